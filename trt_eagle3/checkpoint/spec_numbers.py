"""Check the numbers of a spec or manifest that was read from a bundle, which may be damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from trt_eagle3.checkpoint.config_value import MAX_WHOLE
from trt_eagle3.errors import UserError, quote

__all__ = ["check_numbers"]


_FROM_ZERO = frozenset(
    {
        *("num_position_embeddings", "shared_expert_width", "max_position_embeddings"),
        *("visual_level", "position_shift"),
        *("window", "conv_kernel", "conv_group", "selector_rank", "selector_top_k"),
    }
)
"""Counts that may be 0. Ids and whole numbers in a list may be 0 too."""


def check_numbers(value: Any, name: str) -> None:
    """Check the numbers of a spec or manifest against the range of any model.

    Args:
        name: name of the spec or manifest, for the message.
    Raises:
        UserError: a whole number is negative, too large, or 0 where 0 is not allowed; an epsilon is
            outside 0 to 1; or any other number is not finite.
    """
    items = (
        value.items()
        if isinstance(value, Mapping)
        else ((f.name, getattr(value, f.name)) for f in fields(value))
    )
    for key, item in items:
        where = f"{name}.{key}"
        parts = item if isinstance(item, tuple) else (item,)
        for part in parts:
            if is_dataclass(part) or isinstance(part, Mapping):
                check_numbers(part, where)
            elif isinstance(part, int) and not isinstance(part, bool):
                zero = isinstance(item, tuple) or key in _FROM_ZERO or key.endswith("_token_id")
                least = 0 if zero else 1
                if not least <= part < MAX_WHOLE:
                    raise UserError(
                        f"{where}: expected a whole number from {least} to {MAX_WHOLE - 1}, got "
                        f"{quote(part)}"
                    )
            elif isinstance(part, float) and not _is_number(key, part):
                wanted = "a number from 0 to below 1" if key.endswith("eps") else "a finite number"
                raise UserError(f"{where}: expected {wanted}, got {part}")


def _is_number(key: str, value: float) -> bool:
    return 0 <= value < 1 if key.endswith("eps") else math.isfinite(value)
