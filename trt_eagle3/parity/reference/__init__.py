"""Reference: PyTorch's values for the same prompts, with weights read from the checkpoints."""
