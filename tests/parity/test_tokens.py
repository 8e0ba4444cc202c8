"""Ties and bugs: which mismatch of tokens is which."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.parity.evidence import LOGITS, evidence, expected_answer, measured, recorder_of
from trt_eagle3.parity.checks import target
from trt_eagle3.parity.checks.mismatch import Mismatch
from trt_eagle3.parity.metrics import Compared
from trt_eagle3.parity.record.trees import parents_of

_TYPES = ("float32", "float16", "bfloat16")


def mismatches(
    check: str, *tokens: tuple[int, ...], **overrides: float
) -> tuple[Any, list[Mismatch]]:
    found = measured(check, evidence([expected_answer(*tokens)]), "bfloat16", **overrides)
    return found, found.mismatches


@pytest.mark.parametrize("check", ["tokens.plain", "tokens.speculative"])
def test_equal_tokens_are_no_mismatch(check: str) -> None:
    found, differ = mismatches(check, (0, 1, 0), (0, 1, 0))
    assert differ == found.failures == []
    assert found.counts["tokens compared"] == 3


def test_close_second_is_a_tie_of_a_coarse_type_only() -> None:
    for bound, kind in ((0.3, "tie"), (0.01, "failure")):
        m, (found,) = mismatches("tokens.plain", (0, 1, 1), tie_margin=bound)
        assert found.kind == kind
        assert (found.check, found.step, found.expected, found.got) == ("tokens.plain", 2, 0, 1)
        assert (found.expected_text, found.got_text) == ("<0>", "<1>")
        assert found.margin == pytest.approx(0.1, abs=1e-5)
        assert (found.expected_margin, found.got_margin) == (0.0, pytest.approx(0.1, abs=1e-5))
        assert found.bound == pytest.approx(bound * float(LOGITS[2].square().mean().sqrt()))
        assert bool(m.failures) == (kind == "failure")


def test_far_token_beside_a_close_second_is_a_failure() -> None:
    m, (found,) = mismatches("tokens.plain", (0, 1, 3))
    assert (found.kind, found.got_margin) == ("failure", 7.0)
    (failure,) = m.failures
    assert (failure.value, failure.row, failure.detail) == (
        1,
        5 + 2,
        "1 of 3 tokens, first at step 2",
    )


def test_speculative_answer_is_held_against_the_plain_one() -> None:
    m, found = mismatches("tokens.speculative", (0, 1, 0), (0, 1, 1))
    assert [(m.check, m.kind) for m in found] == [("tokens.speculative", "tie")]
    assert m.failures == []
    _, found = mismatches("tokens.speculative", (0, 1, 0), (0, 3, 0))
    assert [(m.check, m.step, m.kind) for m in found] == [("tokens.speculative", 1, "failure")]


def test_token_that_the_forward_with_speculation_is_expected_to_prefer_is_a_tie() -> None:
    """Its rows went through other experts."""
    e = expected_answer((0, 1, 0), (0, 3, 0))
    other = LOGITS.clone()
    other[1] = torch.tensor([2.0, 0.5, 0.5, 8.0])
    e = dataclasses.replace(e, with_speculation=dataclasses.replace(e, logits=other))
    found = measured("tokens.speculative", evidence([e]), "bfloat16")
    assert [(m.kind, m.expected_margin, m.got_margin) for m in found.mismatches] == [
        ("tie", 0.0, 0.0)
    ]
    wrong = dataclasses.replace(e.answer, speculative=(0, 2, 0))
    found = measured("tokens.speculative", evidence([dataclasses.replace(e, answer=wrong)]))
    assert [m.kind for m in found.mismatches] == ["failure"]


def test_tokens_after_the_first_difference_are_not_held_against_another_prefix() -> None:
    _, found = mismatches("tokens.speculative", (0, 1, 0), (2, 2, 2))
    assert [m.step for m in found] == [0]


def test_speculative_answer_that_stops_short_is_a_failure() -> None:
    m, found = mismatches("tokens.speculative", (0, 1, 0), (0, 1))
    assert found == []
    (failure,) = m.failures
    assert failure.detail == "3 tokens plain, 2 speculative"


def test_parents_follow_from_masks() -> None:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    assert parents_of(mask) == [-1, 0, 0, 2]


def test_nan_is_never_within_a_tolerance() -> None:
    recorder = recorder_of("float32")
    for check in ("target.layers", "target.logits_cosine"):
        assert not recorder[check].limit.holds(float("nan"))
    found = recorder["target.inputs_embeds"]
    found.add_exact(Compared("a", "x", torch.tensor([[float("nan")]]), torch.zeros(1, 1)))
    found.add_exact(Compared("a", "y", torch.zeros(2, 3), torch.zeros(3, 3)))
    assert [m.value for m in found.failures] == [float("inf"), float("inf")]


def test_answers_know_how_far_they_agree() -> None:
    def agreed(plain: Any, speculative: Any) -> int:
        return dataclasses.replace(expected_answer(plain).answer, speculative=speculative).agreed

    assert [agreed((1, 2, 3), s) for s in ((1, 2, 3), (1, 2, 4), (0,), (1, 2))] == [3, 2, 0, 2]


def test_best_token_of_a_sure_row_must_be_the_references_unless_it_is_a_tie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows 0 and 1 are sure by 6 logits, row 2 by 0.5: 0.24 in probability, 0.09 of the size of
    the row.
    """
    theirs = torch.tensor([[8.0, 1.0, -3.0, 0.0], [2.0, 8.0, 0.5, 1.0], [8.0, 7.5, 0.0, 1.0]])
    for turned, failures in (
        (2, {"float32": 1, "float16": 1, "bfloat16": 0}),
        (1, dict.fromkeys(_TYPES, 1)),
    ):
        ours = theirs.clone()
        ours[turned, [0, 1]] = theirs[turned, [1, 0]]
        for dtype in _TYPES:
            rows = [(expected_answer((0, 1, 0)), ours, theirs)]
            monkeypatch.setattr(target, "_logits", lambda _, rows=rows: rows)
            top1, top5 = (measured(f"target.top{k}", None, dtype) for k in (1, 5))
            assert len(top1.failures) == failures[dtype], (turned, dtype)
            assert not top5.failures
