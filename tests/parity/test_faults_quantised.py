"""Faults of quantised bundles are caught and named; without one, all checks hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.caught import QUANTISED, assert_caught
from tests.parity.conftest import TREE, inspect
from tests.parity.faults import FAULTS
from tests.parity.planting import plant_in
from trt_eagle3.parity.report.html import report_html
from trt_eagle3.parity.report.summary import summarise


@pytest.mark.parametrize("name", QUANTISED)
def test_planted_fault_is_caught_and_named(
    name: str,
    quantised_bundle: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_caught(name, quantised_bundle(FAULTS[name].bundle), tmp_path, monkeypatch)


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(("name", "most"), [("made", 0.02), ("calibrated", 0.1)])
def test_without_a_fault_no_gate_fails_of_quantised_weights(
    name: str,
    most: float,
    quantised_bundle: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = plant_in(quantised_bundle(name), tmp_path, monkeypatch)
    found = inspect(planted.engine(), monkeypatch, ("files",), own_sources=True)
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
    assert "Cost of quantisation" in report_html(report)
