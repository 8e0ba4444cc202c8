"""The probe on quantised targets: the usual pair is an FP8 or INT4 target and a 16-bit draft."""

from __future__ import annotations

from pathlib import Path

from tests.quantised import save_quantised
from tests.tiny import DRAFT, QUESTIONS, tiny_config
from trt_eagle3.config import BuildConfig
from trt_eagle3.pipeline import build
from trt_eagle3.probe.run import probe


def test_probe_of_a_quantised_pair_finds_the_manifest_best(tmp_path: Path) -> None:
    target = save_quantised(tmp_path / "target", "fp8")
    report = probe(str(target), str(DRAFT), prompts=QUESTIONS)
    assert report.manifest_is_best, report.overrides
    assert report.fits


def test_probe_of_a_bundle_with_made_weights_finds_what_is_read_wrongly(tmp_path: Path) -> None:
    raw = tiny_config(engine={"weights": "int4"}).model_dump()
    raw["draft"]["overrides"] = {"residual": "normed"}
    bundle = build(BuildConfig.model_validate(raw), output=tmp_path).path
    report = probe(str(bundle), prompts=QUESTIONS)
    assert not report.manifest_is_best
    assert report.overrides.get("residual", "raw") != "normed"
