"""Warnings for settings of a bundle that limit its users."""

from __future__ import annotations

from collections.abc import Iterator

from trt_eagle3.config import LimitsConfig
from trt_eagle3.spec import TargetSpec

__all__ = ["setting_warnings"]


def setting_warnings(limits: LimitsConfig, spec: TargetSpec) -> Iterator[str]:
    """Yield a line for each setting that is valid but probably a mistake."""
    if limits.max_batch_size == 1:
        yield (
            "limits.max_batch_size: 1: requests are answered one after another. Build with 8 or "
            "more to serve several clients at once."
        )
    if spec.vision is not None and limits.max_visual_tokens > limits.max_seq_len:
        yield (
            f"limits.max_visual_tokens: {limits.max_visual_tokens} is above max_seq_len "
            f"({limits.max_seq_len}): no prompt can hold so many, and the vision tower reserves "
            "memory for them. Build with less."
        )
