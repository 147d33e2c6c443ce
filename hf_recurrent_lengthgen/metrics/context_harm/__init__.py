"""Loss by position, excess loss from context, loss within the training length and the length verdict."""
