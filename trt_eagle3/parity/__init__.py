"""Parity: compare an engine with PyTorch (``docs/validate.md``)."""

__all__ = ["SUITES"]

SUITES = ("quick", "full")
"""The bundled workloads."""
