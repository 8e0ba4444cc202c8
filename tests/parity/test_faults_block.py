"""Faults of block drafts and of P-EAGLE are caught and named; without one, all checks hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.caught import BLOCK, assert_caught
from tests.parity.conftest import BLOCKS, inspect
from tests.parity.faults import FAULTS
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.reference.chain_acceptance import _emitted

ABSENT = {
    "dflash2": ["fuse", "confidence"],
    "dspark": ["fuse"],
    "dspark rnn": ["fuse"],
    "p-eagle": ["context", "scores", "confidence", "tokens"],
}
"""Checks that do not apply to a draft."""


@pytest.mark.parametrize("name", BLOCK)
def test_planted_fault_is_caught_and_named(
    name: str,
    block_bundle: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_caught(name, block_bundle(FAULTS[name].bundle), tmp_path, monkeypatch)


@pytest.mark.parametrize("name", BLOCKS)
def test_without_a_fault_no_gate_fails(
    name: str, block_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspect(RecordingEngine(block_bundle(name)), monkeypatch, own_sources=True)
    assert found.diagnosis is None
    of_drafts = {n: m.status for n, m in found.recorder.items() if n.startswith("draft.")}
    absent = {f"draft.{n}" for n in ABSENT[name]}
    assert of_drafts == {
        **dict.fromkeys(of_drafts, "passed"),
        **dict.fromkeys(absent, "not_applicable"),
    }
    if name in {"dspark", "p-eagle"}:
        _assert_accepted_like_the_reference(found.evidence)


def _assert_accepted_like_the_reference(evidence: Evidence) -> None:
    """With and without the engine."""
    counts = evidence.acceptance.recorded
    assert sum(counts.engine) > 2
    assert counts.engine == counts.reference
    assert evidence.drafting is not None
    (expected,) = evidence.expected
    steps = evidence.drafting.reference.speculation.steps
    emitted = _emitted(evidence.drafting.accepted(expected, steps).tolist(), steps)
    assert len(emitted) >= 2
    assert emitted == list(expected.answer.accepted_lengths)[: len(emitted)]
