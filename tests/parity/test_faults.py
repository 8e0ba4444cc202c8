"""Every fault of the catalogue is caught by the gate that is there for it, and the report names
the right tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.conftest import LIMITS, OPTIONAL, TREE, inspect
from tests.parity.faults import DOCUMENT, FAULTS, with_tables
from tests.parity.planting import plant_in
from tests.tiny import build_tiny
from trt_eagle3.decode import engine as engine_module
from trt_eagle3.errors import GateFailedError
from trt_eagle3.multimodal.decoder_pool import DecoderPool
from trt_eagle3.parity.board import GATES
from trt_eagle3.parity.summary import summarise


class SharedPool(DecoderPool):
    """Stays open when an engine that uses it closes."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def decoders() -> Iterator[DecoderPool]:
    pool = SharedPool()
    yield pool
    DecoderPool.close(pool)


@pytest.fixture(autouse=True)
def shared_decoders(decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault is planted in decoder processes, and starting them takes 0.6 s of CPU time."""
    monkeypatch.setattr(engine_module, "DecoderPool", lambda: decoders)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_and_named(
    name: str, tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    planted = plant_in(tree_bundle, tmp_path, monkeypatch)
    fault.plant(planted)
    found = inspect(planted.engine(), monkeypatch, fault.looks)
    assert found.diagnosis is not None, "no gate failed"
    assert (found.diagnosis.gate, found.diagnosis.tensor) == (fault.gate, fault.tensor)
    assert found.diagnosis.stage == GATES[fault.gate].stage
    assert all(found.board.failures(gate) for gate in fault.also)
    report = summarise(found, suite="test", reference="PyTorch")
    assert not report.passed
    with pytest.raises(GateFailedError, match=fault.gate):
        report.check()


COARSE = (
    "transposed weight",
    "chunked rope",
    "deepstack layer",
    "no compaction",
    "draft KV reused",
    "d2t shifted",
)


@pytest.fixture(scope="module")
def bfloat16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "bfloat16"}
    return build_tiny(
        tmp_path_factory.mktemp("bfloat16"), speculation=TREE, limits=LIMITS, engine=engine
    )


@pytest.mark.parametrize("name", [None, *COARSE])
def test_bfloat16_engine_is_sound_and_its_faults_are_named(
    name: str | None, bfloat16_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bfloat16_bundle, tmp_path, monkeypatch)
    if name:
        FAULTS[name].plant(planted)
    found = inspect(planted.engine(), monkeypatch)
    expected = (FAULTS[name].gate, FAULTS[name].tensor) if name else None
    assert (found.diagnosis and (found.diagnosis.gate, found.diagnosis.tensor)) == expected


def test_without_a_fault_no_gate_fails(
    tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inspect(plant_in(tree_bundle, tmp_path, monkeypatch).engine(), monkeypatch, OPTIONAL)
    assert found.diagnosis is None
    assert {gate for gate in GATES if not found.board.measurements.get(gate)} <= {"target.top5"}, (
        "none may be unsure"
    )
    assert summarise(found, suite="test", reference="PyTorch").passed
    counts = found.board.counts["batch.tokens"]
    assert counts["most at once"] > 1, counts
    assert counts["prompt rows reused"], counts


def test_catalogue_is_large_and_reaches_every_stage() -> None:
    assert len(FAULTS) >= 25
    assert {gate for fault in FAULTS.values() for gate in (fault.gate, *fault.also)} == set(
        GATES
    ), "a gate never fails"
    assert {GATES[fault.gate].stage for fault in FAULTS.values()} >= {
        *("bundle", "processor", "vision", "prefill", "decode", "target", "verify"),
        *("draft extend", "fuse", "draft", "propose", "batch", "sampling"),
    }


def test_tables_in_the_document_are_those_of_today() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.parity.faults"
