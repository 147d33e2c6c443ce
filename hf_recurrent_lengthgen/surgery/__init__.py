"""Changes to the weights of a model."""
