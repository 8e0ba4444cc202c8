"""A bundle for TensorRT-LLM."""
