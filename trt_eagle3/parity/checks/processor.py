"""Checks of the processor: ids, positions and patches of every prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import Compared
from trt_eagle3.parity.reference.processor import ReferenceInputs

__all__ = ["check_pixel_values", "check_position_ids", "check_token_ids"]

Inputs = tuple[str, ModelInputs, ModelInputs | ReferenceInputs]
"""Case, the engine's inputs, the expected ones."""


def _prompts(e: Evidence) -> Iterator[Inputs]:
    for expected in e.expected:
        if expected.inputs is not None:
            yield expected.answer.name, expected.answer.inputs, expected.inputs


def check_token_ids(e: Evidence, m: Measurements) -> None:
    """Compare the token ids of the prompts."""
    for case, ours, theirs in _prompts(e):
        m.add_exact(Compared(case, "token_ids", ours.token_ids, theirs.token_ids))


def check_position_ids(e: Evidence, m: Measurements) -> None:
    """Compare rope positions and rope_delta of the prompts."""
    for case, ours, theirs in _prompts(e):
        m.add_exact(Compared(case, "position_ids", ours.position_ids.T, theirs.position_ids.T))
        deltas = torch.tensor([ours.rope_delta]), torch.tensor([theirs.rope_delta])
        m.add_exact(Compared(case, "rope_delta", *deltas))


def check_pixel_values(e: Evidence, m: Measurements) -> None:
    """Compare patches and grids of prompts with images or videos."""
    for case, ours, theirs in _prompts(e):
        if len(theirs.grid_thw) or len(ours.grid_thw):
            m.add_exact(Compared(case, "grid_thw", ours.grid_thw, theirs.grid_thw))
            m.add_exact(Compared(case, "patches", ours.patches, theirs.patches))
