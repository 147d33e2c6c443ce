"""Push checkpoints to the Hugging Face Hub and pull them, completely or not at all."""
