"""What a check says of a bundle that has nothing of what it looks at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.conftest import ask_few_options
from tests.parity.evidence import recorder_of
from tests.quantised import save_quantised
from tests.qwen3 import save_qwen3
from tests.tiny import build_tiny
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.checks.check_recorder import Measurements
from trt_eagle3.parity.checks.registry import CHECKS, run_check
from trt_eagle3.parity.record import options
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.options import HOT_SEEDS
from trt_eagle3.parity.record.workload import Case
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.run import Validation
from trt_eagle3.prompts.prompt_file import Question

_NO_DRAFT = {
    name: "a bundle without a draft"
    for name in CHECKS
    if name.startswith("draft.")
    or name in ("target.aux", "verify.logits", "tokens.speculative", "batch.acceptance")
}
ABSENT = {
    **_NO_DRAFT,
    "weights.values": "no weight is quantised",
    "weights.made": "the build quantised no weight",
    "processor.pixel_values": "the target reads text only",
    "vision.embeds": "the target reads text only",
    "vision.deepstack": "the target reads text only",
    "target.deepstack_embeds": "the target reads text only",
    "kv.rows": "keys and values are cached in the compute type",
    "kv.attention": "keys and values are cached in the compute type",
}
"""Of a bundle that has nothing but a decoder; the other checks apply to every bundle."""


def test_every_check_of_the_plainest_bundle_compares_something_or_does_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "_DRAWS", 250)
    monkeypatch.setattr(sampling_check, "_SETTINGS", {"top_k 5": SamplingParams(1.0, top_k=5)})
    monkeypatch.setattr(options, "NUM_CASES", 1)
    ask_few_options(monkeypatch, ("grammar", "named tool", *HOT_SEEDS[:2]))
    target = save_qwen3(tmp_path / "target")
    engine = RecordingEngine(build_tiny(tmp_path, target=target, draft=None))
    prompts = ("What is 12 plus 30?", "Explain in two sentences why the sky is blue.")
    cases = [Case(prompt, "text", Question(prompt)) for prompt in prompts]
    recorder = Validation(engine).run(cases, 12, *read_sources(engine)).recorder
    reasons = {name: m.reason for name, m in recorder.items() if m.status == "not_applicable"}
    assert reasons == ABSENT
    applied = {name: (m.status, m.compared > 0) for name, m in recorder.items()}
    assert {name for name, found in applied.items() if found != ("passed", True)} == set(ABSENT)


def test_target_without_deepstack_is_told_from_one_that_reads_no_images() -> None:
    spec = SimpleNamespace(vision=object(), num_visual_levels=0)
    for name in ("vision.deepstack", "target.deepstack_embeds"):
        m = _run(name, spec=spec)
        assert (m.status, m.reason) == ("not_applicable", "the target has no deepstack")
    assert CHECKS["vision.embeds"].lacks(SimpleNamespace(spec=spec)) == ""  # type: ignore[arg-type]


def test_quantised_weights_inside_engines_are_skipped_and_do_not_pass(tmp_path: Path) -> None:
    checkpoint = read_target(save_quantised(tmp_path / "target", "fp8"))
    record = SimpleNamespace(weights_root=lambda path: path)
    engine = SimpleNamespace(path=tmp_path / "engines", record=record)
    m = _run("weights.values", checkpoint=checkpoint, engine=engine)
    assert (m.status, m.reason) == (
        "skipped",
        "engines of this backend do not expose their weights",
    )


def test_weights_made_of_a_checkpoint_that_was_not_read_are_skipped() -> None:
    engine = SimpleNamespace(weights="int8")
    made = SimpleNamespace(record=SimpleNamespace(config=SimpleNamespace(engine=engine)))
    m = _run("weights.made", engine=made, original=None)
    assert (m.status, m.reason) == (
        "skipped",
        "the checkpoint that the build quantised was not read",
    )


def test_files_of_which_the_bundle_copied_none_do_not_pass(tmp_path: Path) -> None:
    """Weights were converted, and no file of a processor is there."""
    copied = save_qwen3(tmp_path / "target") / "model.safetensors"
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/other.safetensors").write_bytes(copied.read_bytes() + b" ")
    tensors = open_index(tmp_path / "target")
    sources = {"target": SimpleNamespace(files=["other.safetensors"])}
    record = SimpleNamespace(weights_root=lambda path: path, sources=sources)
    engine = SimpleNamespace(path=tmp_path / "bundle", record=record)
    checkpoint = SimpleNamespace(path=tmp_path / "nothing", tensors=tensors)
    m = _run("bundle.files", engine=engine, checkpoint=checkpoint, manifest=None)
    assert (m.status, m.compared) == ("skipped", 0)
    sources["target"].files.append("copy.safetensors")
    (tmp_path / "bundle/copy.safetensors").write_bytes(copied.read_bytes())
    m = _run("bundle.files", engine=engine, checkpoint=checkpoint, manifest=None)
    assert (m.status, m.compared) == ("passed", len(tensors))


def test_draws_that_fall_into_one_pool_compare_nothing() -> None:
    m = recorder_of("float32")["sampling.tokens"]
    sampling_check._add_frequencies(m, "few", [0, 1, 0], torch.tensor([0.5, 0.5]))
    sampling_check._add_frequencies(m, "none", [], torch.tensor([0.5, 0.5]))
    assert m.status == "skipped"
    sampling_check._add_frequencies(m, "impossible", [1], torch.tensor([1.0, 0.0]))
    assert m.status == "failed"


def _run(name: str, **given: Any) -> Measurements:
    """What check ``name`` makes of evidence with these attributes alone."""
    m = recorder_of("float32")[name]
    evidence: Any = SimpleNamespace(pytorch=object(), **{"manifest": None, **given})
    run_check(evidence, m)
    return m
