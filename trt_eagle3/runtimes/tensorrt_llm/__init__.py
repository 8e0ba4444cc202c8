"""Write bundles for TensorRT-LLM."""
