"""Kinds of drafts: one folder each, which holds all that only this kind needs."""
