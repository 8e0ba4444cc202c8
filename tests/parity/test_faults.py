"""Every fault of the catalogue is caught by the check that is there for it, and the report names
the right tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.conftest import LIMITS, OPTIONAL, TREE, inspect
from tests.parity.fault import MORE_TOKENS
from tests.parity.faults import DOCUMENT, FAULTS, with_tables
from tests.parity.planting import plant_in
from tests.tiny import build_tiny
from trt_eagle3.errors import CheckFailedError
from trt_eagle3.parity.checks.registry import CHECKS
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.report.html import report_html
from trt_eagle3.parity.report.summary import summarise


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught_and_named(
    name: str,
    tree_bundle: Path,
    quantised_bundle: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = FAULTS[name]
    source = quantised_bundle(fault.bundle) if fault.bundle else tree_bundle
    planted = plant_in(source, tmp_path, monkeypatch)
    if fault.bundle:
        planted.spec, _ = read_sources(planted.engine())
    fault.plant(planted)
    settings, asked = {"temperature 0.7", fault.tensor}, {"grammar", fault.tensor}
    found = inspect(
        planted.engine(),
        monkeypatch,
        fault.looks,
        settings,
        asked=asked,
        max_tokens=fault.max_tokens,
        quantised=bool(fault.bundle),
    )
    assert found.diagnosis is not None, "no check failed"
    assert (found.diagnosis.check, found.diagnosis.tensor) == (fault.check, fault.tensor)
    assert found.diagnosis.stage == CHECKS[fault.check].stage
    assert all(found.recorder[check].failures for check in fault.also)
    report = summarise(found, suite="test", reference="PyTorch")
    assert not report.passed
    with pytest.raises(CheckFailedError, match=fault.check):
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
    found = inspect(planted.engine(), monkeypatch, max_tokens=MORE_TOKENS)
    expected = (FAULTS[name].check, FAULTS[name].tensor) if name else None
    assert (found.diagnosis and (found.diagnosis.check, found.diagnosis.tensor)) == expected


def test_without_a_fault_no_gate_fails(
    tree_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = plant_in(tree_bundle, tmp_path, monkeypatch).engine()
    found = inspect(engine, monkeypatch, OPTIONAL, asked=None)
    assert found.diagnosis is None
    unmeasured = {check for check in CHECKS if not found.recorder[check].taken}
    assert unmeasured <= {"target.top5"}, "none may be unsure"
    assert summarise(found, suite="test", reference="PyTorch").passed
    counts = found.recorder["batch.tokens"].counts
    assert counts["most at once"] > 1, counts
    assert counts["prompt rows reused"], counts


@pytest.mark.parametrize(("name", "most"), [("made", 0.02), ("calibrated", 0.1)])
def test_without_a_fault_no_gate_fails_of_quantised_weights(
    name: str,
    most: float,
    quantised_bundle: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = plant_in(quantised_bundle(name), tmp_path, monkeypatch)
    found = inspect(planted.engine(), monkeypatch, ("files",), quantised=True)
    assert found.diagnosis is None
    assert all(found.recorder[check].taken for check in ("weights.values", "weights.made"))
    report = summarise(found, suite="test", reference="PyTorch")
    cost = report.quantisation
    assert cost is not None
    assert 1e-7 < cost.kl_mean < most
    assert cost.top1 > 0.9
    assert cost.first_accepted is not None
    assert cost.first_accepted > 0.05
    assert cost.acceptance_length is not None
    assert cost.acceptance_length_16bit is not None
    assert 1 <= cost.acceptance_length <= 1 + TREE["steps"]
    told = "\n".join(report.lines(()))
    assert "quantisation costs, against" in told
    assert f"acceptance length {cost.acceptance_length:.2f} (" in told
    assert "What quantisation costs" in report_html(report)


def test_catalogue_is_large_and_reaches_every_stage() -> None:
    assert len(FAULTS) >= 25
    assert {check for fault in FAULTS.values() for check in (fault.check, *fault.also)} == set(
        CHECKS
    ), "a check never fails"
    assert {CHECKS[fault.check].stage for fault in FAULTS.values()} >= {
        *("bundle", "processor", "vision", "prefill", "decode", "target", "verify"),
        *("draft extend", "fuse", "draft", "propose", "batch", "sampling"),
    }


def test_tables_in_the_document_are_those_of_today() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python -m tests.parity.faults"
