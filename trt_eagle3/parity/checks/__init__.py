"""Checks: the engine's record against the reference, each check with its name and tolerance."""
