"""Capture of forwards as CUDA graphs, so that the host launches one thing where it launched many.

``whole``: forwards whose shapes come again (steps, short prompts, images), one graph each.
``target_pieces``, ``draft_pieces``: forwards over prompts and mixtures, whose attention is
different every time. All that is computed row by row is captured for few numbers of rows
(``engine.runtime.buckets.ROWS``), cut at attention (``pieces``).
"""
