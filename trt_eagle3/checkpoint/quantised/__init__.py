"""Quantised checkpoints: one file per producer, and the layouts that they store weights in."""
