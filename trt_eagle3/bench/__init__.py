"""Looks on from beside: what is measured.

The figures that the command line knows without loading more.
"""

__all__ = ["MAX_TOKENS", "PLOT_FORMATS", "ROUNDS"]

MAX_TOKENS = 128
ROUNDS = 5
PLOT_FORMATS = (".png", ".svg", ".pdf")
