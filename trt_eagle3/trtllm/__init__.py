"""A bundle for TensorRT-LLM's own runtime, for models that need several GPUs or nodes."""
