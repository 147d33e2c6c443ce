"""Push checkpoints to the Hugging Face Hub and pull them, whole or not at all."""
