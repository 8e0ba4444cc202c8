"""Measuring programs of developers. They are not part of the wheel."""
