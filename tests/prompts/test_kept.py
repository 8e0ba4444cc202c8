"""Prompts that a bundle keeps: copied with their media, and asked where none are given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny import ROOT, build_tiny, tiny_config
from trt_eagle3.bench.run import bench
from trt_eagle3.errors import UserError
from trt_eagle3.parity.record.workload import bundled_cases
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.bundled import bundled_questions
from trt_eagle3.prompts.kept import kept_file, questions_for
from trt_eagle3.prompts.prompt_file import read_questions

QUESTIONS = ROOT / "examples/tiny/images/questions.json"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a prompt file that is gone by the time its prompts are asked."""
    folder = tmp_path_factory.mktemp("kept")
    shutil.copytree(QUESTIONS.parent, folder / "given")
    config = tiny_config().model_copy(update={"prompts": folder / "given/questions.json"})
    built = build(config, output=folder).path
    shutil.rmtree(folder / "given")
    return built


def test_bundle_keeps_prompts_and_their_media(bundle: Path) -> None:
    kept, given = questions_for(bundle, None, vision=True), read_questions(QUESTIONS)
    assert [q.prompt for q in kept] == [q.prompt for q in given]
    for ours, theirs in zip(kept, given, strict=True):
        copies = [Path(str(file)).read_bytes() for file in ours.images]
        assert copies == [Path(str(file)).read_bytes() for file in theirs.images]
        assert [len(video) for video in ours.videos] == [len(video) for video in theirs.videos]


def test_prompts_are_given_then_kept_then_bundled(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps([{"prompt": "mine"}]))
    assert [q.prompt for q in questions_for(bundle, file, vision=True)] == ["mine"]
    plain = build_tiny(tmp_path / "plain", draft=None)
    assert kept_file(plain) is None
    asked = questions_for(plain, None, vision=False)
    assert asked == bundled_questions(vision=False)


def test_bench_and_validate_ask_what_the_bundle_keeps(bundle: Path) -> None:
    result = bench(bundle, batches=[1], requests=[3], rounds=1, max_tokens=8)
    assert result.to_dict()["num_prompts"] == 3
    from trt_eagle3.parity.record.engine import RecordingEngine

    names = [case.name for case in bundled_cases("quick", RecordingEngine(bundle), 8)]
    assert names[:3] == ["questions.json[0]", "questions.json[1]", "questions.json[2]"]
    assert "non-Latin text" in names


def test_missing_media_end_the_build_and_leave_nothing(tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(json.dumps([{"prompt": "What?", "images": ["none.png"]}]))
    config = tiny_config().model_copy(update={"prompts": file})
    with pytest.raises(UserError, match=r"q\.json: entry 0: images: .*none\.png: no such file"):
        build(config, output=tmp_path / "out")
    assert not (tmp_path / "out/tiny").exists()
