"""Figures, one function each, drawn from results only."""
