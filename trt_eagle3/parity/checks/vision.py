"""Checks of the vision tower: visual embeddings and deepstack levels of every prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import RowErrors, errors_or_infinite
from trt_eagle3.parity.reference.target import VisionStates

__all__ = ["check_visual_embeds", "check_visual_levels", "lacks_levels", "lacks_tower"]


def lacks_tower(e: Evidence) -> str:
    """Return why the target has no vision tower; empty if it has one."""
    return "" if e.spec.vision else "the target reads text only"


def lacks_levels(e: Evidence) -> str:
    """Return why the target has no deepstack levels; empty if it has some."""
    return lacks_tower(e) or ("" if e.spec.num_visual_levels else "the target has no deepstack")


def _seen(e: Evidence) -> Iterator[tuple[str, Mapping[str, Tensor], VisionStates]]:
    """Yield case, the engine's outputs and the expected ones of prompts with images or videos."""
    for expected in e.expected:
        if expected.vision is not None and expected.answer.vision is not None:
            yield expected.answer.name, expected.answer.vision.outputs, expected.vision


def check_visual_embeds(e: Evidence, m: Measurements) -> None:
    """Compare visual embeddings."""
    for case, found, expected in _seen(e):
        errors = errors_or_infinite(found["visual_embeds"], expected.visual_embeds)
        m.add_rows(RowErrors(case, "visual_embeds", errors))


def check_visual_levels(e: Evidence, m: Measurements) -> None:
    """Compare every deepstack level; a missing level is an infinite error."""
    for case, found, expected in _seen(e):
        levels = found.get("deepstack", torch.empty(0))
        for i, level in enumerate(expected.visual_levels):
            ours = levels[i] if i < len(levels) else torch.empty(0)
            m.add_rows(RowErrors(case, f"deepstack.{i}", errors_or_infinite(ours, level)))
