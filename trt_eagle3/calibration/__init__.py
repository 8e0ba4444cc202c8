"""Calibration: the 16-bit target runs over a file of prompts, one decoder layer in memory at a
time, and what its activations say goes into the weights that a build makes.
"""
