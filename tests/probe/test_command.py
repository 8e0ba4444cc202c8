"""``trt-eagle3 probe`` as a user meets it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.tiny import DRAFT, ROOT, TARGET, build_tiny, tiny_config
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.cli import main
from trt_eagle3.config import BuildConfig
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.pipeline import build
from trt_eagle3.probe.score import Baseline
from trt_eagle3.prompts.bundled import bundled_questions
from trt_eagle3.prompts.prompt_file import read_questions

PROMPTS = ROOT / "examples/tiny/images/questions.json"


def run(*args: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["trt-eagle3", "probe", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def wrong_bundle(folder: Path, **overrides: Any) -> Path:
    raw = tiny_config(speculation={"steps": 3}).model_dump()
    raw["draft"]["overrides"] = overrides
    return build(BuildConfig.model_validate(raw), output=folder, reference_weights=True).path


def test_pair_read_rightly_is_exit_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TARGET, DRAFT, "--prompts", PROMPTS, monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "no interpretation is significantly better than the manifest in use" in out
    assert "undecided on these prompts: deepstack" in out
    assert "overrides" not in out
    assert out.endswith("the draft is read correctly\n")


def test_wrong_bundle_is_exit_1_and_its_override_lines_put_it_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = wrong_bundle(
        tmp_path, residual="normed", rope={"layout": "1d", "kind": "default", "base": 10000.0}
    )
    assert run(bundle, "--prompts", PROMPTS, "--json", monkeypatch=monkeypatch) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert set(found) == {
        *(
            "bundle",
            "prompts",
            "num_prompts",
            "num_tokens",
            "num_steps",
            "manifest_is_best",
            "fits",
            "finding",
            "chance",
            "changes",
            "overrides",
        ),
        *("override_lines", "silent", "undecided", "interpretations"),
    }
    assert found["changes"] == {"residual": "hidden", "rope.base": 5e6}
    assert captured.err.count("\n") == 1
    assert "residual=hidden" in captured.err
    assert set(found["interpretations"][0]) == {
        *(
            "changes",
            "cross_entropy",
            "position_0",
            "acceptance_length",
            "difference",
            "standard_error",
            "standing",
        ),
    }
    assert found["finding"] == "better"
    changes = [interpretation["changes"] for interpretation in found["interpretations"]]
    standings = [interpretation["standing"] for interpretation in found["interpretations"]]
    assert set(standings[: changes.index({})]) == {"better"}
    assert "better" not in standings[changes.index({}) :]

    pasted = yaml.safe_load(found["override_lines"])["draft"]["overrides"]
    spec = read_target(TARGET)
    repaired, right = (read_draft(DRAFT, spec, overrides) for overrides in (pasted, {}))
    assert (repaired.residual, repaired.rope) == (right.residual, right.rope)


def test_draft_right_by_chance_only_is_exit_4_and_called_another_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its head's rows belong to other tokens, which no interpretation changes: the manifest is
    the best, and worth nothing.
    """
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    weights = load_file(draft / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
    (draft / "model.safetensors").unlink()
    save_file(weights, draft / "model.safetensors")
    assert (
        run(TARGET, draft, "--prompts", PROMPTS, "--max-tokens", 12, monkeypatch=monkeypatch) == 4
    )
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    assert "no interpretation fits: the best is right about" in out
    assert "acceptance_floor 0.25" in out
    assert "significantly better" not in out
    assert "Guessing the most frequent token is right about" in out
    assert "Check that the draft was trained for this target" in out
    assert captured.out.endswith("\nnothing fits, case 1: right by chance only\n")
    assert captured.err == ""


def test_prompts_that_do_not_fit_are_exit_4_and_rank_nothing_above_the_manifest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled prompts are unlike what the tiny pair was trained on."""
    assert run(TARGET, DRAFT, "--json", monkeypatch=monkeypatch) == 4
    captured = capsys.readouterr()
    assert "no interpretation of the draft fits" in captured.err
    found = json.loads(captured.out)
    assert (found["finding"], found["fits"]) == ("prompts", False)
    assert found["interpretations"][0]["changes"] == {}
    assert found["prompts"] == "generic"
    assert run(TARGET, DRAFT, monkeypatch=monkeypatch) == 4
    printed = capsys.readouterr().out
    closing = "nothing fits, case 2: above chance, so these prompts do not fit"
    assert printed.splitlines()[-1] == closing
    out = " ".join(printed.split())
    assert "than their own token frequencies do" in out
    assert "note: generic prompts were used" in out


def test_baseline_is_the_frequencies_of_the_answers() -> None:
    found = Baseline.of(torch.tensor([7, 7, 7, 2]))
    assert (found.num_tokens, found.top_share) == (4, 0.75)
    assert found.entropy == pytest.approx(0.5623, abs=1e-4)
    assert Baseline(100, 0.1, 4.0).is_chance(0.18)
    assert not Baseline(100, 0.1, 4.0).is_chance(0.2)


def test_table_for_people_names_the_better_reading_and_what_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = wrong_bundle(tmp_path, feedback="post_norm")
    assert run(bundle, "--prompts", PROMPTS, monkeypatch=monkeypatch) == 1
    out = capsys.readouterr().out
    assert "a better interpretation: feedback=pre_norm" in out
    assert "draft:\n  overrides: {feedback: pre_norm}" in out


def test_text_prompts_say_nothing_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "What is 12 plus 30?",
        "What is 7 plus 61?",
        "What is 25 plus 14?",
        "What is 33 plus 58?",
    ]
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([{"prompt": text} for text in asked * 2]))
    run(wrong_bundle(tmp_path), "--prompts", file, "--json", monkeypatch=monkeypatch)
    silent = json.loads(capsys.readouterr().out)["silent"]
    assert {"deepstack", "image rows", "positions", "position shift", "rope layout"} <= set(silent)
    assert "aux offset" not in silent


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "in a JSON list or one on each line"),
        ('[{"images": []}]', "entry 0"),
        ('[{"prompt": "hi", "images": "a.png"}]', "images"),
        ('[{"prompt": "hi", "frames": [1]}]', "frames"),
        ('[{"prompt": "hi", "image": "a.png"}]', "image: no such key. Use images"),
        (
            '[{"prompt": "hi"}, {"prompt": "hi", "images": ["a.png"]}]',
            "entry 1: images: .*/a.png: no such file. Paths are relative to /",
        ),
    ],
)
def test_bad_prompt_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_questions(file)


def test_prompt_file_paths_are_relative_to_it() -> None:
    image, _, video = read_questions(PROMPTS)
    assert image.images == [PROMPTS.parent / "scene.png"]
    assert len(video.videos) == 1


def test_bundle_without_a_draft_is_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(build_tiny(tmp_path, draft=None), "--prompts", PROMPTS, monkeypatch=monkeypatch) == 2
    assert "without a draft" in capsys.readouterr().err


def test_set_reads_a_pair_otherwise_and_is_refused_for_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        "--prompts",
        PROMPTS,
        "--override",
        "aux_layers=[0,2,3]",
        "--override",
        "residual=normed",
    )
    assert run(TARGET, DRAFT, *wrong, monkeypatch=monkeypatch) == 1
    out = capsys.readouterr().out
    assert "aux_layers: [1, 3, 4]" in out
    assert "residual: hidden" in out
    assert run(wrong_bundle(tmp_path), *wrong, monkeypatch=monkeypatch) == 2
    assert "overrides are for a pair" in capsys.readouterr().err


def test_one_token_answers_are_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TARGET, DRAFT, "--max-tokens", 1, monkeypatch=monkeypatch) == 2
    assert "max_tokens" in capsys.readouterr().err


def test_bundled_prompts_have_texts_images_and_a_video() -> None:
    asked = bundled_questions()
    assert [bool(q.images) for q in asked] == [False, False, False, True, True, False]
    assert [bool(q.videos) for q in asked] == [False] * 5 + [True]


def test_a_draft_with_nan_in_its_weights_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DRAFT, tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][:] = float("nan")
    save_file(tensors, file)
    assert run(TARGET, tmp_path / "draft", "--prompts", PROMPTS, monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert "draft: its logits are not finite" in captured.err
    assert captured.err.count("\n") == 1
