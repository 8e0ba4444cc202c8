"""Probe: which reading of a draft fits its target best (``docs/probe.md``)."""
