"""Sampled answers against their own distribution, where a coarse type makes many logits equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parity.evidence import evidence, recorder_of
from trt_eagle3.parity.checks import sampling_entropy
from trt_eagle3.parity.checks.sampling import reference_probs
from trt_eagle3.parity.record.answers import SampledAnswer
from trt_eagle3.parity.record.record import SAMPLING

ROW = torch.cat([torch.tensor([6.0, 5.0]), torch.full((60,), 1.0), torch.full((10,), -40.0)])
"""top_p ends among the sixty that are equal."""


def p_value(tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> float:
    rows: dict[int, Tensor] = dict.fromkeys(range(len(tokens)), ROW)
    monkeypatch.setattr(sampling_entropy, "_logits_by_row", lambda *_: rows)
    answer = SampledAnswer("a", torch.zeros(1, dtype=torch.int64), tokens, [])
    measurements = recorder_of("bfloat16")["sampling.tokens"]
    sampling_entropy.check_entropy(evidence(sampled=[answer]), measurements)
    (found,) = measurements.taken
    return found.value


def test_equal_logits_at_the_edge_of_a_filter_may_each_be_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probs = reference_probs(ROW, SAMPLING)
    kept, lost = ((probs[2:62] > 0) == side for side in (True, False))
    assert kept.any()
    assert lost.any(), "the edge lies elsewhere"
    drawn = probs.multinomial(200, replacement=True, generator=torch.Generator().manual_seed(0))
    others = torch.where(probs[drawn] == probs[2:62].max(), 2 + int(lost.nonzero()[0]), drawn)
    assert (
        p_value(tuple(others.tolist()), monkeypatch)
        == p_value(tuple(drawn.tolist()), monkeypatch)
        > 0.01
    )


def test_what_no_filter_keeps_may_not_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_value((0, 1, 70), monkeypatch) == 0.0
    assert p_value((0,) * 200, monkeypatch) < 1e-6, "greedy answers have too little of it"
