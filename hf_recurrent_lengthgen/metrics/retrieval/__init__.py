"""How often a model retrieves what was far back in a text."""
