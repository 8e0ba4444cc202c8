"""Read checkpoints: safetensors index, target spec, draft manifest."""
