"""All metrics of a model together: how far it holds, and why it fails where it does not."""
