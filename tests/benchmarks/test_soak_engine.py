"""The soak of an engine: it ends clean, and wrong tokens, held pages and growing memory are each
found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_trace
from benchmarks.memory_trace import MemoryTrace
from benchmarks.soak_engine import soak_engine
from tests.tiny import build_tiny
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.errors import UserError
from trt_eagle3.prompts.prompt_file import Question

QUESTIONS = [Question("What is 12 plus 30?")]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits={"max_batch_size": 4})


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("_SHORT", 6),
        ("_LONG", 12),
        ("_PAUSE_S", 0.01),
        ("_SETTLE_S", 60.0),
        ("_SAMPLES", 3),
    ):
        monkeypatch.setattr(f"benchmarks.soak_engine.{name}", value)


def test_soak_of_a_sound_engine_finds_nothing(bundle: Path) -> None:
    report = soak_engine(bundle, QUESTIONS, count=8, in_flight=4, seed=1)
    assert report.faults == []
    assert sum(report.outcomes.values()) == 16
    assert report.outcomes["cancelled"] > 0
    assert report.pages["held"] == 0


def test_soak_finds_tokens_that_depend_on_the_neighbours(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def wrong(self: Decoder, sequences: Any, tree: Any) -> Any:
        found = step(self, sequences, tree)
        if len(sequences) > 1:
            sequences[-1].tokens[-1] = 5
        return found

    monkeypatch.setattr(Decoder, "step", wrong)
    report = soak_engine(bundle, QUESTIONS, count=8, in_flight=4)
    assert any("answers have other tokens than alone" in fault for fault in report.faults)


def test_soak_finds_a_page_that_is_never_given_back(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.soak_engine._SETTLE_S", 0.1)
    monkeypatch.setattr(PagePool, "num_used", property(lambda self: self.num_pages - 1))
    report = soak_engine(bundle, QUESTIONS, count=8, in_flight=4)
    assert any("pages of the KV cache are held" in fault for fault in report.faults)


def test_more_in_flight_than_the_bundle_decodes_is_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match="--in-flight 9: this bundle decodes 4 at once"):
        soak_engine(bundle, QUESTIONS, count=10, in_flight=9)


@pytest.mark.parametrize(("step", "leaks"), [(0.0, False), (1.0, False), (14.0, True)])
def test_memory_that_grows_steadily_is_a_fault_and_ups_and_downs_are_none(
    step: float, leaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([500.0 + step * i + 60 * (i % 2) * (step == 0) for i in range(20)])
    monkeypatch.setattr(memory_trace, "_anonymous_mib", lambda: next(sizes))
    trace = MemoryTrace("cpu")
    for _ in range(20):
        trace.sample()
    assert bool(trace.faults()) == leaks
