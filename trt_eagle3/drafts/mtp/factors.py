"""The ambiguous fields of MTP heads: no tensor determines them, and servers differ in each."""

from __future__ import annotations

from collections.abc import Mapping

from trt_eagle3.probe.interpretation import Factor, choice, image_rows, positions

__all__ = ["FACTORS"]

FACTORS: Mapping[str, Factor] = {
    # factors that do not change the draft's graph come first, as in other kinds
    "hidden state": choice("hidden", "normed", "raw"),
    "image rows": image_rows,
    "positions": positions,
    "position shift": choice("position_shift", 0, 1),
    "halves of fc": choice("concat", "embedding_first", "hidden_first"),
    "feedback": choice("feedback", "post_norm", "pre_norm"),
    "norms": choice("norm_offset", 0.0, 1.0),
}
"""Factor -> its possible values."""
