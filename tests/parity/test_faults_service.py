"""Faults that a prompt alone never meets are caught and named; without one, all checks hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.caught import SERVED, assert_caught
from tests.parity.conftest import OPTIONAL, inspect
from tests.parity.planting import plant_in
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.report.summary import summarise


@pytest.mark.parametrize("name", SERVED)
def test_planted_fault_is_caught_and_named(
    name: str, tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_caught(name, tree_bundle, tmp_path, monkeypatch)


def test_without_a_fault_no_gate_fails(
    tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plant_in(tree_bundle, tmp_path, monkeypatch).engine()
    found = inspect(engine, monkeypatch, OPTIONAL, asked=None)
    assert found.diagnosis is None
    skipped = {check for check in CHECKS if found.recorder[check].status == "skipped"}
    assert skipped <= {"target.top5"}, "none may be unsure"
    assert summarise(found, suite="test", reference="PyTorch").passed
    counts = found.recorder["batch.tokens"].counts
    assert counts["most at once"] > 1, counts
    assert counts["prompt rows reused"], counts
