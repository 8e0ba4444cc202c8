"""Checks of the target's inputs: embeddings, deepstack rows and positions of every row.

Shapes: n rows of a sequence, H hidden, L deepstack levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import Compared
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordedForward
from trt_eagle3.parity.record.trace import embeds_of, positions_of, rows_of, visual_levels_of
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["check_visual_level_inputs", "check_inputs_embeds", "check_position_ids"]


def check_inputs_embeds(e: Evidence, m: Measurements) -> None:
    """Compare token embeddings, with the engine's own visual rows in their places."""
    for answer in e.answers:
        given = embeds_of(answer.autoregressive_forwards)
        expected = e.reference.embed(answer.token_ids[:-1]).cpu().to(given.dtype)
        visual = _visual_output(answer, "visual_embeds")
        if visual is not None:
            expected = expected.clone()
            expected[answer.visual_rows] = visual.to(given.dtype)
        m.add_exact(Compared(answer.name, "inputs_embeds", given, expected))


def check_visual_level_inputs(e: Evidence, m: Measurements) -> None:
    """Compare deepstack inputs: the engine's own levels on visual rows, zeros elsewhere."""
    for answer in e.answers:
        if "deepstack_embeds" not in answer.autoregressive_forwards[0].inputs:
            continue
        given = visual_levels_of(answer.autoregressive_forwards)
        expected = torch.zeros_like(given)
        levels = _visual_output(answer, "deepstack")
        if levels is not None:
            expected[answer.visual_rows] = levels.transpose(0, 1).to(given.dtype)
        pair = given.flatten(1), expected.flatten(1)
        m.add_exact(Compared(answer.name, "deepstack_embeds", *pair))


def _visual_output(answer: RecordedAnswer, name: str) -> Tensor | None:
    """Return an output of the vision graph; None if its token count is not the prompt's."""
    if answer.vision is None or name not in answer.vision.outputs:
        return None
    fits = len(answer.vision.outputs["visual_embeds"]) == int(answer.visual_rows.sum())
    return answer.vision.outputs[name] if fits else None


def check_position_ids(e: Evidence, m: Measurements) -> None:
    """Compare rope positions of every row, including decoded and verified rows."""
    for expected in e.expected:
        answer = expected.answer
        verified = [f for f in answer.speculative_forwards if f.graph == "target"]
        for forward in [*answer.autoregressive_forwards, *verified]:
            m.add_exact(_positions(expected, forward))


def _positions(expected: ExpectedAnswer, forward: RecordedForward) -> Compared:
    """Pair positions: a tree row's depth is its mask count; rows past the answer are dropped."""
    rows = rows_of(forward)
    tree = rows.past >= expected.answer.prompt_len
    depths = rows.mask.sum(dim=1) - 1 if tree else torch.arange(rows.count)
    at = rows.past + rows.first + depths
    inside = at < len(expected.positions)
    found, wanted = positions_of(forward)[inside], expected.positions[at[inside]]
    return Compared(expected.answer.name, "position_ids", found, wanted, rows.start)
