"""All metrics of a model together: up to which length it generalizes, and why it fails beyond."""
