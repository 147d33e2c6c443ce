"""Recurrent language models that keep working beyond their training length."""
