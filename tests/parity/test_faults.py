"""Every fault of the catalogue is caught by the gate that is there for it, and the report names the right tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.conftest import inspect
from tests.parity.faults import DOCUMENT, FAULTS, with_tables
from tests.parity.planting import plant_in
from trt_eagle3.errors import GateFailedError
from trt_eagle3.parity.board import GATES
from trt_eagle3.parity.summary import summarise


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_and_named(
    name: str, tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    planted = plant_in(tree_bundle, tmp_path, monkeypatch)
    fault.plant(planted)
    found = inspect(planted.engine(), monkeypatch, sampled=fault.sampled)
    assert found.diagnosis is not None, "no gate failed"
    assert (found.diagnosis.gate, found.diagnosis.tensor) == (fault.gate, fault.tensor)
    assert found.diagnosis.stage == GATES[fault.gate].stage
    report = summarise(found, suite="test", reference="PyTorch")
    assert not report.passed
    with pytest.raises(GateFailedError, match=fault.gate):
        report.check()


def test_without_a_fault_no_gate_fails(tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect(plant_in(tree_bundle, tmp_path, monkeypatch).engine(), monkeypatch)
    assert found.diagnosis is None
    assert [gate for gate in GATES if not found.board.measurements.get(gate)] == []
    assert summarise(found, suite="test", reference="PyTorch").passed


def test_catalogue_is_large_and_reaches_every_stage() -> None:
    assert len(FAULTS) >= 25
    assert {GATES[fault.gate].stage for fault in FAULTS.values()} >= {
        *("bundle", "processor", "vision", "prefill", "decode", "target", "verify"),
        *("draft extend", "fuse", "draft", "propose", "sampling"),
    }


def test_tables_in_the_document_are_those_of_today() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.parity.faults"
