"""Kinds of drafts: one folder each, with all code that only this kind needs."""
