"""What is ambiguous in MTP heads: no tensor decides it, and servers have had each of them wrong."""

from __future__ import annotations

from collections.abc import Mapping

from trt_eagle3.probe.interpretation import Factor, choice, image_rows, positions

__all__ = ["FACTORS"]

FACTORS: Mapping[str, Factor] = {
    # those that leave the draft's graph as it is come first, as in other kinds
    "hidden state": choice("hidden", "normed", "raw"),
    "image rows": image_rows,
    "positions": positions,
    "position shift": choice("position_shift", 0, 1),
    "halves of fc": choice("concat", "embedding_first", "hidden_first"),
    "feedback": choice("feedback", "post_norm", "pre_norm"),
    "norms": choice("norm_offset", 0.0, 1.0),
}
"""Factor -> the values that it may have."""
