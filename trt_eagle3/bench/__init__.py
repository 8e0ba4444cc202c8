"""Benchmarks.

This module defines only the constants that the command line needs without loading more.
"""

__all__ = ["MAX_TOKENS", "PLOT_FORMATS", "ROUNDS"]

MAX_TOKENS = 128
ROUNDS = 5
PLOT_FORMATS = (".png", ".svg", ".pdf")
