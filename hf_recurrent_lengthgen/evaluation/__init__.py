"""Metrics, diagnoses and the result schema."""
