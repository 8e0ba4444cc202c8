"""Calibration: run the 16-bit target over a file of prompts, and quantise its weights.

One decoder layer is in memory at a time. The layer's activations determine its quantised weights.
"""
