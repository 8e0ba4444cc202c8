"""Calibration files that cannot be used are refused in one line, before anything is computed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.calibration.conftest import MAX_LEN
from tests.tiny import QUESTIONS, tiny_config
from trt_eagle3.calibration import prompts as module
from trt_eagle3.calibration.prompts import CalibrationPrompts, read_prompts
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.cli import main
from trt_eagle3.errors import UserError
from trt_eagle3.pipeline import build

BAD = {
    "nothing": ("", "expected {.*} in a JSON list or one on each line"),
    "empty list": ("[]", "in a JSON list or one on each line"),
    "no JSON": ("[{]", "not JSON"),
    "line": ('{"prompt": "a"}\n\n{"prompt": }', r"bad\.jsonl: line 3: not JSON"),
    "no prompt": ('{"images": []}', "entry 0: expected"),
    "missing image": (
        '{"prompt": "a"}\n{"prompt": "b", "images": ["no.png"]}',
        r"entry 1: .*no\.png",
    ),
    "no image": ('{"prompt": "b", "images": ["bad.jsonl"]}', r"entry 0: .*bad\.jsonl"),
    "missing frame": (
        '{"prompt": "b", "frames": ["no.png"]}',
        r"entry 0: frames: .*no\.png: no such",
    ),
    "long": (json.dumps({"prompt": "a b c " * 300}), "entry 0: .*tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_file_that_cannot_be_used_is_refused_before_any_work(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    stages: list[str] = []
    config = tiny_config(engine={"weights": "int4"}, limits={"max_seq_len": MAX_LEN})
    with pytest.raises(UserError, match=message) as caught:
        build(config, output=tmp_path / "out", calibration=file, progress=stages.append)
    assert "\n" not in str(caught.value)
    assert stages == ["checkpoints"]
    assert not (tmp_path / "out").exists()


def test_absent_file_is_refused(target: TargetCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot read the prompts: No such file"):
        read_prompts(tmp_path / "none.jsonl", target, MAX_LEN)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_calibration_of_weights_that_need_none_is_refused(
    weights: str | None, prompt_file: Path, tmp_path: Path
) -> None:
    config = tiny_config(engine={"weights": weights})
    with pytest.raises(UserError, match=f"engine.weights is {weights or 'none'}. Set engine.weig"):
        build(config, output=tmp_path, calibration=prompt_file)
    assert not list(tmp_path.iterdir())


def test_list_and_lines_are_the_same_prompts(
    prompt_file: Path, prompts: CalibrationPrompts, target: TargetCheckpoint
) -> None:
    lines = [json.loads(line) for line in prompt_file.read_text().splitlines()]
    listed = prompt_file.with_suffix(".json")
    listed.write_text(json.dumps(lines))
    found = read_prompts(listed, target, MAX_LEN)
    assert str(found) == str(prompts)
    assert found.num_visual_tokens == prompts.num_visual_tokens > 0


def test_answer_is_part_of_what_is_calibrated_on(target: TargetCheckpoint, tmp_path: Path) -> None:
    counts = []
    for entry in ({"prompt": "a"}, {"prompt": "a", "answer": "There is a blue cross."}):
        file = tmp_path / "one.json"
        file.write_text(json.dumps([entry]))
        counts.append(read_prompts(file, target, MAX_LEN).num_tokens)
    assert counts[1] > counts[0] + 5


def test_prompts_beyond_the_most_tokens_are_checked_and_left_out(
    target: TargetCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 40)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    file = tmp_path / "many.json"
    file.write_text(json.dumps([{"prompt": "What?", "images": ["a.png"]}] * 9))
    found = read_prompts(file, target, MAX_LEN)
    assert 0 < len(found.inputs) < 9
    assert str(found).endswith(f"; {9 - len(found.inputs)} more left out, beyond 40 tokens")
    file.write_text(json.dumps([{"prompt": "What?", "images": ["a.png"]}] * 9 + [{"prompt": 1}]))
    with pytest.raises(UserError, match="entry 9: expected"):
        read_prompts(file, target, MAX_LEN)


def test_interrupted_calibration_leaves_nothing_behind(prompt_file: Path, tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("decoder layer 2"):
            made = [path.name for path in tmp_path.rglob("layer-*.safetensors")]
            assert made == ["layer-0.safetensors"]  # there is something that could be left
            raise KeyboardInterrupt

    config = tiny_config(engine={"weights": "int4"})
    with pytest.raises(KeyboardInterrupt):
        build(config, output=tmp_path, calibration=prompt_file, show=interrupt)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".safetensors", ".json"}]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_command_calibrates_and_tells_what_it_takes_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    raw = tiny_config(engine={"weights": "int4", "quantise_head": True}).model_dump(mode="json")
    config.write_text(json.dumps(raw))
    words = ("build", "--config", config, "--output", tmp_path / "out", "--calibration", QUESTIONS)
    monkeypatch.setattr(sys, "argv", ["trt-eagle3", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    told = capsys.readouterr()
    assert re.search(r"calibration: 3 prompts of \d+ tokens; about [\d.]+ GB .* \d+ min", told.err)
    assert "calibrated on 3 prompts of" in told.out
    held = [path.name for path in (tmp_path / "out/tiny").rglob("*.safetensors")]
    assert "quantised-int4.safetensors" in held
    assert not [name for name in held if name.startswith(("layer-", "head"))]
