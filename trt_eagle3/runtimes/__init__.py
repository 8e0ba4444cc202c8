"""Write bundles for other runtimes, for models on several GPUs or nodes; one folder each."""
