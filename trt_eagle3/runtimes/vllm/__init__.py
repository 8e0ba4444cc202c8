"""A bundle for vLLM."""
