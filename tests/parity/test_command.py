"""``trt-eagle3 validate`` as a user meets it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.conftest import ask_few_options
from tests.parity.fault import MAX_TOKENS
from tests.parity.faults import FAULTS
from tests.parity.planting import plant_in
from tests.parity.shared_reference import share_reference
from tests.tiny import ROOT, TARGET, build_tiny, tiny_config
from trt_eagle3.checkpoint.tensor_index import open_file
from trt_eagle3.cli import main
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.builder.weight_file import write_tables
from trt_eagle3.engine.bundle.weight_locations import TABLE_FILE, TableLocations, table_tensors
from trt_eagle3.parity import run as run_module
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.record import options
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.report import plots
from trt_eagle3.pipeline import build

PROMPTS = ROOT / "examples/tiny/images/questions.json"

pytestmark = pytest.mark.usefixtures("wide_console")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command with short answers; the page's plots, most settings of sampling and most
    sets of options, which have tests of their own, are left out.
    """
    monkeypatch.setattr(run_module, "MAX_TOKENS", {"quick": MAX_TOKENS})
    monkeypatch.setattr(sampling_check, "_DRAWS", 250)
    monkeypatch.setattr(
        sampling_check, "_SETTINGS", {"top_k 5": SamplingParams(temperature=1.0, top_k=5)}
    )
    monkeypatch.setattr(plots, "_svg", lambda _: "<svg></svg>")
    monkeypatch.setattr(options, "NUM_CASES", 1)
    ask_few_options(monkeypatch, ("grammar + stop", "named tool"))
    share_reference(monkeypatch)

    def run(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["trt-eagle3", "validate", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One question about one picture."""
    folder = tmp_path_factory.mktemp("prompts")
    (question, *_) = json.loads(PROMPTS.read_text())
    question["images"] = [str(PROMPTS.parent / name) for name in question["images"]]
    (folder / "one.json").write_text(json.dumps([question]))
    return folder / "one.json"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("engines"), limits={"max_seq_len": 128, "max_visual_tokens": 64}
    )


def test_sound_bundle_is_exit_0_and_leaves_its_report_in_the_bundle(
    validate, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    ended = validate(bundle, "--prompts", prompts, "--junit", tmp_path / "checks.xml")
    assert ended.code == 0
    assert re.search(
        r"checks hold, 0 failed, \d skipped, 8 not applicable; 1 prompt, "
        rf"{MAX_TOKENS} tokens, 0 ties",
        ended.out,
    )
    assert "not checked: sequences longer than" in ended.out
    assert f"wrote {bundle / 'parity/report.html'}" in ended.out
    assert json.loads((bundle / "parity/report.json").read_text())["passed"] is True
    assert (tmp_path / "checks.xml").read_text().startswith("<?xml")


@pytest.mark.parametrize("option", ["--output", "--junit"])
def test_place_that_cannot_be_written_is_refused_before_anything_is_computed(
    validate, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def computed(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("trt_eagle3.parity.run.run_validation", computed)
    (tmp_path / "file").write_text("")
    place = {"--output": tmp_path / "file", "--junit": tmp_path / "file" / "checks.xml"}[option]
    ended = validate(bundle, option, place)
    assert ended.code == 2
    assert "cannot write the report" in ended.err
    ended = validate(bundle, "--junit", tmp_path)
    assert ended.code == 2
    assert "it is a folder" in ended.err


def test_faulty_bundle_is_exit_1_with_one_line_that_names_the_tensor(
    validate, bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bundle, tmp_path, monkeypatch)
    FAULTS["attention scale"].plant(planted)
    ended = validate(
        planted.bundle, "--prompts", prompts, "--output", tmp_path / "report", "--json"
    )
    assert ended.code == 1
    report = json.loads(ended.out)
    assert report["passed"] is False
    assert report["diagnosis"]["tensor"] == "layers.1.self_attn.out"
    assert ended.err.count("\n") == 1
    assert "first in target: layers.1.self_attn.out" in ended.err
    assert (tmp_path / "report/report.html").is_file()
    assert not (planted.bundle / "parity/report.json").is_file() or bundle != planted.bundle


def test_looser_tolerance_is_used_and_shown(
    validate, bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bundle, tmp_path, monkeypatch)
    FAULTS["epsilon"].plant(planted)
    (tmp_path / "loose.yaml").write_text(
        "\n".join(f"{name}: 1" for name in ("layer_step", "layer_output", "aux"))
    )
    looser = ("--thresholds", tmp_path / "loose.yaml")
    loose = validate(planted.bundle, "--prompts", prompts, "--output", tmp_path / "report", *looser)
    lines = {
        line.split()[1]: line.split()[0]
        for line in loose.out.splitlines()
        if line.startswith(("ok", "FAIL", "--"))
    }
    assert lines["target.layer_steps"] == "ok"
    assert "tolerance set by the user: layer_step = 1 instead of 2e-05" in loose.out


def test_checkpoint_that_moved_is_asked_for_and_found_where_it_is_named(
    validate, prompts: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "here"
    shutil.copytree(TARGET, moved)
    path = build(tiny_config(target=moved), output=tmp_path).path
    moved.rename(tmp_path / "there")
    lost = validate(path, "--prompts", prompts)
    assert lost.code == 2
    assert "--target PATH" in lost.err
    assert lost.err.count("\n") == 1
    assert validate(path, "--prompts", prompts, "--target", tmp_path / "there").code == 0


def test_checkpoint_of_another_pair_is_refused(
    validate, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    shutil.copytree(TARGET, tmp_path / "other")
    weights = tmp_path / "other/model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data.replace(b"layers.0.input", b"layers.9.input", 1))
    ended = validate(bundle, "--prompts", prompts, "--target", tmp_path / "other")
    assert ended.code == 2
    assert "layers.9" in ended.err or "not the target" in ended.err


@pytest.mark.parametrize("changed", [False, True])
def test_checkpoint_is_known_by_its_content_whatever_its_files_are_called(
    validate, bundle: Path, prompts: Path, tmp_path: Path, changed: bool
) -> None:
    shutil.copytree(TARGET, tmp_path / "other")
    weights = tmp_path / "other/model.safetensors"
    tensors = load_file(weights)
    if changed:
        tensors["model.visual.extra"] = torch.zeros(3)
    weights.unlink()
    name = "model-00001-of-00001.safetensors"
    if changed:
        save_file(tensors, tmp_path / "other" / name)
    else:
        shutil.copy(TARGET / "model.safetensors", tmp_path / "other" / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (tmp_path / "other/model.safetensors.index.json").write_text(json.dumps(index))
    ended = validate(bundle, "--prompts", prompts, "--target", tmp_path / "other")
    assert ended.code == (2 if changed else 0), ended.err
    assert not changed or "size or header of" in ended.err


def test_two_bundles_are_compared(validate, bundle: Path, prompts: Path, tmp_path: Path) -> None:
    other = build_tiny(
        tmp_path, engine={"backend": "torch"}, limits={"max_seq_len": 128, "max_visual_tokens": 64}
    )
    ended = validate("--compare", bundle, other, "--prompts", prompts)
    assert ended.code == 0
    report = json.loads((other / "parity/compare.json").read_text())
    assert (report["mode"], report["other"]["backend"], report["bundle"]["backend"]) == (
        "compare",
        "onnxruntime",
        "torch",
    )
    checks = {g["name"]: g["status"] for g in report["checks"]}
    assert (
        checks["target.layers"] == checks["target.logits_l2"] == checks["tokens.plain"] == "passed"
    )
    assert checks["sampling.tokens"] == checks["target.layer_steps"] == "skipped"


def test_bundles_of_which_one_has_a_draft_are_compared_only_where_that_is_asked_for(
    validate, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    plain = build_tiny(tmp_path, draft=None, limits={"max_seq_len": 128, "max_visual_tokens": 64})
    for pair in ((bundle, plain), (plain, bundle)):
        ended = validate("--compare", *pair, "--prompts", prompts)
        assert ended.code == 2
        assert f"{bundle} has a draft, {plain} has none" in ended.err
        assert "--target-only" in ended.err
    ended = validate(
        "--compare",
        bundle,
        plain,
        "--target-only",
        "--prompts",
        prompts,
        "--output",
        tmp_path / "report",
    )
    assert ended.code == 0
    assert "draft.acceptance, batch.acceptance (the targets alone were compared)" in " ".join(
        ended.out.split()
    )
    assert "Not checked" in (tmp_path / "report/compare.html").read_text()


def test_table_beside_engines_is_no_file_of_the_checkpoint(bundle: Path, tmp_path: Path) -> None:
    """As in a TensorRT bundle, whose record names that one file."""
    engines = Path(
        shutil.copytree(bundle, tmp_path / "engines", ignore=shutil.ignore_patterns("model.onnx"))
    )
    engine = RecordingEngine(bundle)
    write_tables(engines / TABLE_FILE, table_tensors(*read_sources(engine)), dtype_named("float32"))
    tables = TableLocations(engines / TABLE_FILE, open_file(engines / TABLE_FILE))
    sources = {
        r: s.model_copy(update={"files": tables.files(r)}) for r, s in engine.record.sources.items()
    }
    changes = {"embedding": tables.token_table(), "draft_tensors": tables.draft_tensors()}
    record = engine.record.model_copy(update={**changes, "sources": sources})
    (engines / "bundle.json").write_text(record.model_dump_json())
    spec, manifest = read_sources(RecordingEngine(engines))
    assert spec.path == TARGET
    assert manifest is not None


def test_faulty_second_bundle_of_a_comparison_is_exit_1(
    validate, bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(bundle, tmp_path, monkeypatch)
    FAULTS["gate and up"].plant(planted)
    ended = validate(
        "--compare", bundle, planted.bundle, "--prompts", prompts, "--output", tmp_path
    )
    assert ended.code == 1
    assert "first in target: layers.5.output" in ended.err


def test_target_alone_is_validated_without_draft_gates(
    validate, prompts: Path, tmp_path: Path
) -> None:
    path = build_tiny(tmp_path, draft=None, limits={"max_seq_len": 128, "max_visual_tokens": 64})
    ended = validate(path, "--prompts", prompts)
    assert ended.code == 0
    assert re.search(r"not applicable: .*\(a bundle without a draft\)", ended.out)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            float("nan"),
            "model.safetensors: model.language_model.norm.weight: contains values that are not "
            "finite numbers",
        ),
        (3e38, "although every weight of"),
    ],
)
def test_target_without_an_answer_is_exit_1_with_the_reason(
    validate, prompts: Path, tmp_path: Path, value: float, message: str
) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    weights = load_file(target / "model.safetensors")
    weights["model.language_model.norm.weight"][7] = value
    save_file(weights, target / "model.safetensors")
    path = build_tiny(
        tmp_path, target=target, draft=None, limits={"max_seq_len": 128, "max_visual_tokens": 64}
    )
    ended = validate(path, "--prompts", prompts)
    assert ended.code == 1
    assert message in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", "two"), "one bundle; two need --compare"),
        (("--compare", "one"), "two bundles, A and B"),
        (("--compare", "one", "two", "--float64"), "--compare has none"),
        (("one", "--target-only"), "--target-only needs --compare"),
        (("nowhere",), "no bundle here"),
        (("nowhere", "--thresholds", "none.yaml"), "cannot read the thresholds"),
    ],
)
def test_wrong_arguments_are_exit_2_in_one_line(
    validate, arguments: tuple[str, ...], message: str
) -> None:
    ended = validate(*arguments)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_tolerance_beyond_a_float_is_exit_2_in_one_line(validate, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(f"exact: {'9' * 400}\n")
    ended = validate("nowhere", "--thresholds", file)
    assert ended.code == 2
    assert "exact: expected a number of at least 0" in ended.err
    assert ended.err.count("\n") == 1
