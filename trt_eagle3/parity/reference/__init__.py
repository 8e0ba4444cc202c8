"""Reference: what PyTorch computes of the same prompts, weights read again from the checkpoints."""
