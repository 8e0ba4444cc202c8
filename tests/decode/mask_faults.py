"""Planted faults in the grammar masks of drafted trees: each mask is that of another node.

Shapes: T tree nodes, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trt_eagle3.decode.sampling.grammar_masks import NO_MASK
from trt_eagle3.decode.sampling.grammar_state import ALL_ALLOWED
from trt_eagle3.decode.speculation import tree_masks

__all__ = ["bonus_unmasked", "not_rolled_back", "parents_masks"]


def parents_masks(patch: pytest.MonkeyPatch) -> None:
    """A node gets the mask of its parent."""

    def change(_: Any, __: Any, parents: Any, rows: Any) -> None:
        rows[:] = rows[[max(parent, 0) for parent in parents]].copy()

    _changed(patch, change)


def bonus_unmasked(patch: pytest.MonkeyPatch) -> None:
    """The bonus token of a leaf may be any."""

    def change(_: Any, tokens: Any, parents: Any, rows: Any) -> None:
        if len(tokens) > 1:
            rows[sorted(set(range(len(tokens))) - set(parents))] = ALL_ALLOWED

    _changed(patch, change)


def not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A state is left at the first drafted token after its masks are computed."""
    _changed(patch, lambda state, tokens, *_: state.matcher.try_consume_tokens(tokens[1:2]))


def _changed(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, Any, Any], object]) -> None:
    """``change(state, tokens, parents, rows)`` after the masks of every tree; ``rows`` int32
    [T, W].
    """
    true = tree_masks.fill_trees

    def fill(jobs: Any, masks: Any) -> Any:
        found = np.array(true(jobs, masks))
        every = masks[found.clip(0)]
        every[found == NO_MASK] = ALL_ALLOWED
        for job, rows in zip(jobs, every, strict=True):
            change(*job, rows)
        masks[:] = every.reshape(masks.shape)
        return np.arange(len(masks)).reshape(found.shape).tolist()

    patch.setattr(tree_masks, "fill_trees", fill)
