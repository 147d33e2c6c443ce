"""Loss by position, context harm, loss inside the training length and the length verdict: every evaluation."""
