"""Checks: compare the engine's record with the reference, each with a name and a tolerance."""
