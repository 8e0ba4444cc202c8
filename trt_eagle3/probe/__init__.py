"""Probe: find the interpretation of a draft that fits its target best (``docs/probe.md``)."""

__all__ = ["MAX_TOKENS"]

MAX_TOKENS = 96
"""Most tokens of an answer to a prompt."""
