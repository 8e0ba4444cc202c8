"""What lies on disk: safetensors index, target spec, draft manifest."""
