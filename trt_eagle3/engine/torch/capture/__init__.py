"""Capture forwards as CUDA graphs, so that one launch replaces many.

``whole``: forwards with repeated shapes (steps, short prompts, images), one graph each.
``target_pieces``, ``draft_pieces``: forwards over prompts, and over prompts and decoding sequences
in one batch. Their attention differs every time. The row-by-row nodes between attentions
(``pieces``) are captured for a few numbers of rows (``engine.runtime.buckets.ROWS``).
"""
