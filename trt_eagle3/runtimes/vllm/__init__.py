"""Write bundles for vLLM."""
