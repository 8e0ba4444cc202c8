"""Served answers of a validation: over the same sessions, ahead of the host, beside prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity.conftest import LIMITS, TREE, inspect
from tests.parity.fault import MORE_TOKENS
from tests.parity.planting import plant_in
from tests.tiny import build_tiny
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.parity.record.answers import answer_cases
from trt_eagle3.parity.record.engine import RecordingEngine, RecordingSessionFactory
from trt_eagle3.parity.record.serving import answer_served
from trt_eagle3.parity.record.workload import Case
from trt_eagle3.prompts.prompt_file import Question

CASES = [
    Case(f"sum {i}", "text", Question(f"What is {i} plus {2 * i}?" + " And again?" * (7 * i % 5)))
    for i in range(6)
]


@pytest.fixture(scope="module")
def torch_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    return build_tiny(folder, engine={"backend": "torch"}, speculation=TREE, limits=LIMITS)


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every size of a batch, which the CPU has nothing to capture of, and which takes long."""
    monkeypatch.setattr(RecordingEngine, "capture_graphs", lambda _: 0)


def test_sound_engine_that_launches_ahead_passes(
    torch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant_in(torch_bundle, tmp_path, monkeypatch)
    planted.fixed_shapes = True
    found = inspect(planted.engine(), monkeypatch, ("serve",), max_tokens=MORE_TOKENS)
    assert found.diagnosis is None
    served = found.recorder["serve.tokens"]
    assert served.status == "passed"
    assert served.counts["steps launched ahead"] > 0


class _Counting(RecordingSessionFactory):
    def __init__(self) -> None:
        super().__init__()
        self.opened = Counter[str]()

    def _open(self, bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
        self.opened[graph] += 1
        return super()._open(bundle, graph, intermediates)


def test_serving_opens_no_session_records_nothing_and_runs_prompts_beside_steps(
    torch_bundle: Path,
) -> None:
    factory = _Counting()
    engine = RecordingEngine(torch_bundle, factory)
    engine.bundle = replace(engine.bundle, fixed_shapes=True)
    answers = answer_cases(engine, CASES, MORE_TOKENS, lambda: None)
    engine.take()
    served = answer_served(engine, answers, MORE_TOKENS, lambda: None)
    assert factory.opened == Counter(["target", "fuse", "draft"])
    assert not engine.take()
    assert served.num_mixed > 0
    assert served.num_ahead > 0
    for replies in served.replies:
        assert [r.token_ids for r in replies] == [a.autoregressive for a in answers]
    engine.close()
