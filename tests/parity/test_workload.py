"""What bundles are asked: kinds, limits, and that images come from code alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import build_tiny
from trt_eagle3.errors import UserError
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case, bundled_cases, draw_image, read_cases


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RecordingEngine:
    return RecordingEngine(build_tiny(tmp_path_factory.mktemp("workload")))


def kinds(cases: list[Case]) -> set[str]:
    return {case.kind for case in cases}


def test_quick_suite_has_every_kind_and_full_has_more(engine: RecordingEngine) -> None:
    quick, full = (bundled_cases(suite, engine, 32) for suite in ("quick", "full"))
    assert kinds(quick) == kinds(full) == {"text", "image", "images", "aspect", "video", "long"}
    assert {case.name for case in quick} < {case.name for case in full}
    assert any(ord(max(case.question.prompt)) > 0x3000 for case in quick), "non-Latin text"


def test_every_case_fits_with_its_answer_and_the_long_one_nearly_fills_the_limit(
    engine: RecordingEngine,
) -> None:
    limit = engine.limits.max_seq_len
    for case in bundled_cases("full", engine, 128):
        q = case.question
        length = len(engine.prepare(q.prompt, q.images, q.videos).token_ids)
        assert length + 128 <= limit
        if case.kind == "long":
            assert length + 128 > limit - 60


def test_small_bundle_gets_fewer_cases_and_a_tiny_one_is_refused(engine: RecordingEngine) -> None:
    small = RecordingEngine(engine.path)
    small.use(replace(small.bundle, limits=small.limits.model_copy(update={"max_seq_len": 80})))
    small.processor.max_prompt_len = 79
    names = [case.name for case in bundled_cases("quick", small, 32)]
    assert "text" in names
    assert "non-Latin text" not in names
    small.use(replace(small.bundle, limits=small.limits.model_copy(update={"max_seq_len": 33})))
    with pytest.raises(UserError, match="fits none of the bundled prompts"):
        bundled_cases("quick", small, 32)


def test_images_are_functions_of_their_seed() -> None:
    first, again, other = (np.asarray(draw_image(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.std() > 20, "a picture with nothing on it shows no fault"


def test_own_prompts_are_named_by_their_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    questions = [
        {"prompt": "hi"},
        {"prompt": "see", "images": ["a.png", "b.png"]},
        {"prompt": "v", "frames": ["c"]},
    ]
    file.write_text(json.dumps(questions))
    for name in ("a.png", "b.png", "c"):
        (tmp_path / name).touch()
    cases = read_cases(file)
    assert [(case.name, case.kind) for case in cases] == [
        ("mine.json[0]", "text"),
        ("mine.json[1]", "images"),
        ("mine.json[2]", "video"),
    ]
