"""Acceptance that the reference counts without an engine, against what an engine accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import LIMITS, inspect
from tests.parity.fault import MAX_TOKENS
from tests.tiny import build_tiny
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.reference.chain_acceptance import _emitted, chain_acceptance

STEPS = 3


def test_chain_acceptance_is_what_an_engine_with_that_chain_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = {"mode": "chain", "steps": STEPS}
    bundle = build_tiny(tmp_path, speculation=speculation, limits=LIMITS)
    evidence = inspect(RecordingEngine(bundle), monkeypatch).evidence
    drafting, expected = evidence.drafting, evidence.expected
    assert drafting is not None
    rows = drafting.accepted(expected[0], STEPS)
    accepted = rows.tolist()
    emitted = _emitted(accepted, STEPS)
    engines = list(expected[0].answer.accepted_lengths)
    assert len(emitted) >= 3
    assert emitted == engines[: len(emitted)]
    assert sum(emitted) >= MAX_TOKENS - 1 - 2 * STEPS
    found = chain_acceptance([rows], STEPS)
    assert found.length == sum(emitted) / len(emitted)
    assert found.first == sum(n > 0 for n in accepted) / len(accepted)


@pytest.mark.parametrize(
    ("accepted", "emitted"),
    [([3, 0, 0, 0, 1, 2, 0], [4, 2]), ([0, 0], []), ([0, 0, 0, 0], [1, 1])],
)
def test_emitted_leaves_out_the_end_of_the_answer(accepted: list[int], emitted: list[int]) -> None:
    assert _emitted(accepted, STEPS) == emitted
