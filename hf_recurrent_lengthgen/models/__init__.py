"""Models, scans and the state value; these files travel inside checkpoints."""
