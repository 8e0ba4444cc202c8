"""A bundle for other runtimes, for models that need several GPUs or nodes; one folder each."""
