"""Probe: which interpretation of a draft fits its target best (``docs/probe.md``)."""

__all__ = ["MAX_TOKENS"]

MAX_TOKENS = 96
"""Of an answer to a prompt, at most."""
