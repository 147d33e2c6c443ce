"""Push checkpoints to the Hugging Face Hub, completely or not at all."""
