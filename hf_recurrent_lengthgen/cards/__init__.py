"""Model cards: what was done to a checkpoint, what it can do, how to load it - from records and results only."""
