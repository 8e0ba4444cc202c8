"""Measuring programs for developers; not part of the wheel."""
