"""What the host adds to a step: counted in every form, and work that is put there is found."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.host import FORMS, measure
from benchmarks.host_crowd import Crowd
from tests.tiny import build_tiny
from trt_eagle3.decode.request.output import Output

CROWD = Crowd(batch=3, steps=10, step_ms=1.0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits={"max_batch_size": 4})


DECODING = {
    "scheduler": "MainThread",
    "tasks": "trt-eagle3-decode",
    "threads": "trt-eagle3-decode",
    "http": "engine: trt-eagle3-decode",
}


@pytest.mark.parametrize(("form", "chain"), [*product(("scheduler", "tasks"), (0, 3)), ("http", 0)])
def test_forms_are_measured(bundle: Path, form: str, chain: int) -> None:
    assert DECODING.keys() == FORMS.keys()
    crowd = Crowd(3, chain, steps=10, step_ms=1.0)
    cost = measure(bundle, form, crowd)
    # the first step may be on its way when the clock starts
    assert cost.wall >= (crowd.steps - 1) / crowd.steps * crowd.step_ms, "less than the device's"
    assert 0.0 < cost.cpu[DECODING[form]] <= cost.total


def test_work_of_the_engine_besides_steps_is_found(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spun_ms = 4.0

    def spin(self: Output, *words: Any, **options: Any) -> Any:
        end = time.thread_time() + spun_ms / 1e3
        while time.thread_time() < end:
            pass
        return take(self, *words, **options)

    take = Output.take
    monkeypatch.setattr(Output, "take", spin)
    cost = measure(bundle, "threads", CROWD)
    assert cost.cpu[DECODING["threads"]] >= 0.9 * CROWD.batch * spun_ms
