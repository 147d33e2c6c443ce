"""The `lengthgen` command."""
