"""The harm of long states and of long attention of a hybrid, apart."""
