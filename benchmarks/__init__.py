"""Measuring programs of developers; they are not part of the wheel."""
