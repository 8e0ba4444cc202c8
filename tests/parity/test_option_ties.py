"""Ties under options: a coarse type may turn two tokens that are nearly equal, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path

import pytest
import torch

from tests.parity.conftest import LIMITS, TREE, inspect
from tests.parity.evidence import LOGITS, recorder_of
from tests.parity.fault import gives
from tests.parity.faults_options import ignore_seeds
from tests.parity.planting import Tensors, plant_in
from tests.tiny import build_tiny
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.mismatch import Choice, find_mismatch
from trt_eagle3.parity.metrics import sizes
from trt_eagle3.parity.record.options import HOT_SEEDS

CHECK = "options.tokens"


def kind_of(choice: Choice, expected: int, got: int, dtype: str = "bfloat16") -> str:
    m: Measurements = recorder_of(dtype)[CHECK]
    return find_mismatch(m, "a", 0, choice, (expected, got), lambda ids: f"<{ids[0]}>").kind


def test_tie_is_one_among_allowed_tokens() -> None:
    row = torch.tensor([8.0, 1.0, 0.9, -3.0])
    allowed = row.masked_fill(torch.tensor([True, False, False, False]), -torch.inf)
    assert kind_of(Choice(row), 1, 2) == "failure"
    assert kind_of(Choice(row, allowed), 1, 2) == "tie"
    assert kind_of(Choice(row, allowed), 1, 2, "float32") == "failure"
    assert kind_of(Choice(row, allowed), 1, 3) == "failure"
    assert kind_of(Choice(row, allowed), 1, 0) == "failure", "a forbidden token"


@pytest.mark.parametrize(("share", "expected"), [(0.9, "tie"), (1.1, "failure")])
def test_bound_is_that_of_the_raw_logits_and_scores_are_compared(
    share: float, expected: str
) -> None:
    bound = 0.3 * float(sizes(LOGITS[:1]))
    scores = torch.tensor([5.0, 5.0 - share * bound, -50.0, -50.0])
    assert kind_of(Choice(LOGITS[0], scores), 0, 1) == expected


@pytest.mark.parametrize(("rare", "expected"), [(2e-4, "tie"), (5e-5, "failure")])
def test_drawn_token_deep_in_the_tail_is_a_failure(rare: float, expected: str) -> None:
    probs = torch.tensor([0.6, 0.4 - rare, rare, 0.0], dtype=torch.float64)
    choice = Choice(LOGITS[0], probs=probs)
    assert kind_of(choice, 0, 1) == "tie"
    assert kind_of(choice, 0, 2) == expected
    assert kind_of(choice, 0, 1, "float32") == "failure", "drafts do not round in float32"
    assert kind_of(choice, 0, 3) == "failure", "a token that cannot be drawn"


@pytest.fixture(scope="module")
def bfloat16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "bfloat16"}
    return build_tiny(
        tmp_path_factory.mktemp("ties"), speculation=TREE, limits=LIMITS, engine=engine
    )


def even_lowered(_: Tensors, outputs: Tensors) -> Tensors:
    """Logits of every other token are too low by twice the row's size, where there is a tree."""
    logits = outputs["logits"].clone()
    if logits.shape[1] > 1:
        logits[..., ::2] -= 2.0 * logits.square().mean(dim=-1, keepdim=True).sqrt()
    return {**outputs, "logits": logits}


def noisy(inputs: Tensors, outputs: Tensors) -> Tensors:
    """Logits of a tree, of several sequences, are rounded otherwise, by 2 %."""
    logits = outputs["logits"].clone()
    if inputs["inputs_embeds"][..., 0].numel() > 1:
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        logits += 0.02 * logits.square().mean(dim=-1, keepdim=True).sqrt() * noise
    return {**outputs, "logits": logits}


ASKED = ("grammar", "grammar + min_tokens", "penalties", "seed", *HOT_SEEDS)


def test_answers_of_batches_that_round_otherwise_are_ties(
    bfloat16_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bfloat16_bundle, tmp_path, monkeypatch)
    gives("target", noisy)(planted)
    found = inspect(planted.engine(), monkeypatch, ("options",), asked=ASKED)
    assert found.diagnosis is None
    assert found.recorder[CHECK].counts["ties"] > 0
    seeds = found.recorder["options.seeds"]
    assert seeds.counts["draws compared"] >= len(HOT_SEEDS)
    assert not seeds.failures


def test_answers_of_trees_that_prefer_other_tokens_are_failures(
    bfloat16_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bfloat16_bundle, tmp_path, monkeypatch)
    gives("target", even_lowered)(planted)
    found = inspect(planted.engine(), monkeypatch, ("options",), asked=("penalties",))
    assert found.recorder[CHECK].failures


@pytest.mark.parametrize(
    ("seeds", "tensor"), [(count(), "once more"), (repeat(0), "other seeds")], ids=["new", "same"]
)
def test_seeds_that_are_ignored_are_noticed(
    bfloat16_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seeds: Iterator[int],
    tensor: str,
) -> None:
    ignore_seeds(monkeypatch, seeds)
    planted = plant_in(bfloat16_bundle, tmp_path, monkeypatch)
    found = inspect(planted.engine(), monkeypatch, ("options",), asked=("seed", *HOT_SEEDS))
    assert [failure.tensor for failure in found.recorder["options.seeds"].failures] == [tensor]
    assert not found.recorder[CHECK].failures, "whatever may be drawn at all is excused"
