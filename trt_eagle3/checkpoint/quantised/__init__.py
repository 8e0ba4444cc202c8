"""Read quantised checkpoints: one file per producer, and the layouts of stored weights."""
