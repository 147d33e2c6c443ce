"""The states of a model over a long text: statistics, distances from training, patching."""
