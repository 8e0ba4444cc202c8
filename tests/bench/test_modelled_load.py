"""Load on a modelled GPU: what is counted, and what takes how long."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.tiny import build_tiny
from trt_eagle3.bench import modelled_load
from trt_eagle3.bench.modelled_load import ModelledGpu, serve
from trt_eagle3.bench.modelled_times import (
    H200_DEPTHS,
    cycle_ms,
    draft_prompt_ms,
    interpolated,
    mixed_ms,
    prompt_ms,
)
from trt_eagle3.bench.stand_in import Forward
from trt_eagle3.bench.traffic import drawn_bodies


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


def test_forwards_are_counted_and_take_what_was_measured() -> None:
    gpu = ModelledGpu(2.0)
    assert gpu.seconds_of(Forward("target", 8, 1, False)) == 2 * 4.61 / 1e3
    assert gpu.seconds_of(Forward("target", 8, 4, False)) == 2 * 6.10 / 1e3
    prompt = gpu.seconds_of(Forward("target", 2, 512, True))
    assert prompt == 2 * prompt_ms(1024) / 1e3
    assert 0 < gpu.seconds_of(Forward("draft", 2, 512, True)) < 0.1 * prompt
    assert gpu.seconds_of(Forward("draft", 8, 1, False)) == 0, "it is in the cycle"
    assert (gpu.steps, gpu.prefills, gpu.of_draft) == (2, 1, 1)
    beside = gpu.seconds_of(Forward("target", 2, 512, True, beside=8))
    assert beside == 2 * mixed_ms(1024, 8) / 1e3
    assert prompt < beside < prompt + 2 * 4.61 / 1e3, "the weights are read once"
    assert (gpu.steps, gpu.prefills) == (3, 2)


def test_times_grow_with_what_is_asked() -> None:
    assert interpolated({2: 1.0, 4: 3.0}, 3) == 2.0
    assert interpolated({2: 1.0, 4: 3.0}, 1) == 1.0
    assert interpolated({2: 1.0, 4: 3.0}, 8) == 6.0
    for depth in H200_DEPTHS:
        assert all(cycle_ms(a, depth) <= cycle_ms(b, depth) for a, b in pairwise(range(1, 200)))
    assert cycle_ms(8, 4) == cycle_ms(8, 3)
    assert prompt_ms(1) == prompt_ms(64) < prompt_ms(512)
    assert draft_prompt_ms(512) < prompt_ms(512) / 10


def test_load_is_served_whole_and_drafts_that_are_right_save_steps(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelled_load, "_PER_CLIENT", 2)
    monkeypatch.setattr(modelled_load, "_MAX_TOKENS", 60)
    monkeypatch.setattr(modelled_load, "_PAUSE_S", 0.01)
    asked = drawn_bodies(4, seed=0, pictures=0.0, max_tokens=60, max_words=300)
    plain, drafted = (serve(bundle, 2, length, 1.0) for length in (None, 3.9))
    for served in (plain, drafted):
        assert served.num_tokens == sum(body["max_tokens"] for body in asked)
        assert len(served.first) == 4
        assert served.gpu.prefills >= 4
        assert served.seconds > served.gpu.steps * cycle_ms(1, 0) / 1e3, "less than the GPU's time"
        assert 0 <= served.idle_seconds < served.seconds
        assert len(served.cells()) == len(modelled_load._COLUMNS)
    assert plain.gpu.of_draft == 0 < drafted.gpu.of_draft
    assert drafted.gpu.steps < 0.7 * plain.gpu.steps
