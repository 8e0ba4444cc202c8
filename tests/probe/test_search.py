"""The proof: of a wrong manifest of the tiny pair, the search names the wrong field and recovers
its value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.probe.conftest import Asked
from trt_eagle3.checkpoint.rope_schedule import make_rope
from trt_eagle3.probe.interpretation import Interpretation
from trt_eagle3.probe.score import Score
from trt_eagle3.probe.search import contrast, search
from trt_eagle3.spec import RopeSpec

BASE = 5e6  # what the tiny draft was trained with, plain and 1-D
SECTIONS = (12, 10, 10)

WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aux one layer late": ({"aux_layers": (2, 4, 5)}, {"aux_layers": (1, 3, 4)}),
    "vision rows": ({"image_rows": "vision", "image_rows_rotated": True}, {"image_rows": "pad"}),
    "rope kind linear": (
        {"rope": make_rope("linear", BASE, 64, parameters={"factor": 8.0})},
        {"rope.kind": "default"},
    ),
    "rope chunked, base 1e4": (
        {"rope": RopeSpec.plain(64, 1e4, "chunked", SECTIONS), "positions": "3d"},
        # chunked sections turn the slowest pairs only: nothing these prompts show
        {"rope.base": BASE},
    ),
    "residual normed": ({"residual": "normed"}, {"residual": "hidden"}),
    "feedback post-norm": ({"feedback": "post_norm"}, {"feedback": "pre_norm"}),
    "three fields": (
        {"aux_layers": (0, 2, 3), "feedback": "post_norm", "rope": RopeSpec.plain(64, 1e4)},
        {"aux_layers": (1, 3, 4), "feedback": "pre_norm", "rope.base": BASE},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_manifest_is_named_and_put_right(name: str, tiny: Asked) -> None:
    fields, expected = WRONG[name]
    found = search(tiny.scorer, replace(tiny.manifest, **fields), tiny.bundle.spec)
    assert dict(found.best.changes) == expected
    assert contrast(found.scores[Interpretation()], found.scores[found.best]).standing == "worse"


def test_right_manifest_is_the_best_reading(tiny: Asked) -> None:
    assert search(tiny.scorer, tiny.manifest, tiny.bundle.spec).best == Interpretation()


INVISIBLE: dict[str, dict[str, Any]] = {
    "deepstack added": {"aux_pre_deepstack": False},
    "position shift": {"position_shift": 1},
    "linear positions": {"positions": "linear"},
    "interleaved": {"rope": RopeSpec.plain(64, BASE, "interleaved", SECTIONS), "positions": "3d"},
    "double first norm": {"first_norm": "double"},
}


@pytest.mark.parametrize("name", INVISIBLE)
def test_what_the_tiny_draft_hardly_feels_gets_no_finding(name: str, tiny: Asked) -> None:
    wrong = replace(tiny.manifest, **INVISIBLE[name])
    lengths = [tiny.scorer.score(m).acceptance_length for m in (wrong, tiny.manifest)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)
    assert search(tiny.scorer, wrong, tiny.bundle.spec).best == Interpretation()


def test_progress_ends_at_its_total(tiny: Asked) -> None:
    seen: list[tuple[int, int]] = []
    found = search(
        tiny.scorer,
        tiny.manifest,
        tiny.bundle.spec,
        lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == list(range(1, len(found.scores) + 1))
    assert all(done <= total for done, total in seen)
    assert seen[-1][0] == seen[-1][1]


@dataclass(frozen=True)
class Drawn:
    """Cross-entropies of a made-up draft and target entropy."""

    shift: float
    spread: float
    standing: str


@pytest.mark.parametrize(
    "drawn",
    [
        Drawn(0.0, 0.0, "no difference"),
        Drawn(0.0, 0.5, "unclear"),
        Drawn(-0.5, 0.5, "better"),
        Drawn(0.5, 0.5, "worse"),
        Drawn(-0.004, 0.0, "unclear"),  # sure, and less than 1 % of the divergence
    ],
    ids=str,
)
def test_contrast(drawn: Drawn) -> None:
    generator = torch.Generator().manual_seed(0)
    other = 1 + torch.rand(200, generator=generator).double()
    noise = drawn.spread * torch.randn(200, generator=generator).double()
    ours = other + drawn.shift + noise - noise.mean()
    assert contrast(Score(ours, 0.5, 0, 1), Score(other, 0.5, 0, 1)).standing == drawn.standing


def test_contrast_of_many_small_and_few_large_differences_goes_by_ranks() -> None:
    other = torch.full((200,), 0.01, dtype=torch.float64)
    ours = other + 0.001
    ours[7] = 9.0  # alone it makes the mean unsure
    assert contrast(Score(ours, 0, 0, 1), Score(other, 0, 0, 1)).standing == "worse"
