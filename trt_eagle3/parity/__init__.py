"""Parity: does an engine compute what PyTorch computes? (``docs/validate.md``)."""

__all__ = ["SUITES"]

SUITES = ("quick", "full")
"""The bundled workloads."""
