"""FP8 keys and values whose scales are calibrated: what the bundle holds, and that it is sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.calibration.conftest import write_prompts
from tests.parity.conftest import inspect
from tests.tiny import build_tiny
from trt_eagle3.calibration import activations
from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.engine.builder.calibration import Calibration
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.report.summary import summarise


def test_kv_scales_hold_twice_the_largest_number_of_each_head(calibration: Calibration) -> None:
    scales = calibration.kv_scales()
    assert len(scales) == len(calibration.k_amax)
    for layer, found in scales.items():
        for own, amax in (
            (found.k, calibration.k_amax[layer]),
            (found.v, calibration.v_amax[layer]),
        ):
            torch.testing.assert_close(torch.tensor(own) * 448, 2 * amax)


def test_calibrate_without_weights_finds_the_same_keys_and_makes_none(
    target: TargetCheckpoint,
    prompts: CalibrationPrompts,
    calibration: Calibration,
    tmp_path: Path,
) -> None:
    found = calibrate(target, prompts, "cpu", tmp_path, weights=False)
    assert not found.weights
    assert not found.scales.by_producer
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(found.k_amax, calibration.k_amax)
    assert all((own > 0).all() for own in found.v_amax.values())


def test_bundle_with_calibrated_weights_and_kv_scales_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "MAX_SAMPLES", 128)  # how good they are is no matter here
    engine = {"backend": "torch", "kv_dtype": "fp8", "weights": "int4"}
    prompts = write_prompts(tmp_path / "four.jsonl", "train", 3, 4)
    bundle = build_tiny(tmp_path, calibration=prompts, engine=engine)
    held = read_bundle(bundle).kv_scales
    assert all(len(scales.k) == len(scales.v) == 2 for scales in held.values())
    assert 0.005 < held[0].k[0] < 0.5
    found = inspect(RecordingEngine(bundle), monkeypatch, ("files",), own_sources=True)
    assert found.diagnosis is None
    assert summarise(found, suite="test", reference="PyTorch").passed
