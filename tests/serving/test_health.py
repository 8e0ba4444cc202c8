"""``/health`` while an engine hangs: in a step that does not end, or as a process that stands
still.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.decode.steps import held_steps
from tests.serving.site import Site, serving
from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.request.stopwatch import Stopwatch
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.errors import UserError
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.channel import GetMetrics, Metrics
from trt_eagle3.serving.engine_process import EngineJob
from trt_eagle3.serving.remote_engine import RemoteEngine

ASKED = Request("Hi", sampling=SamplingParams(max_tokens=4))
SOON = ServingConfig(max_step_s=0.05)
NO_PROMPT = "the engine has prepared no prompt for "
NO_STEP = "the engine has finished no step for "
SILENT = "the engine's process has not answered for "


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as engine:
        engine.generate("Hi", max_tokens=2)
        yield engine


def answers(site: Site, status: int, begin: str) -> Callable[[], bool]:
    def holds() -> bool:
        found, text, _ = site.request("GET", "/health")
        return found == status and text.startswith(begin)

    return holds


def test_step_that_does_not_end_is_seen_and_so_is_that_steps_go_on(
    engine: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trt_eagle3")
    with serving(engine, SOON) as site:
        wait_for(answers(site, 200, "ok"))
        with held_steps(monkeypatch):
            answer = engine.submit(ASKED)
            wait_for(answers(site, 503, NO_STEP))
            assert site.request("GET", "/health")[1].endswith(" s (max_step_s: 0.05)")
        assert answer.finish().finish_reason is not None
        wait_for(answers(site, 200, "ok"))
    said = [message for message in caplog.messages if "/health" in message]
    assert [message.split(":")[0] for message in said] == [
        "/health answers 503",
        "/health answers 200",
    ]


def test_preparation_that_makes_no_progress_is_seen(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, inputs = threading.Event(), PromptPreprocessor.model_inputs

    def wait(self: PromptPreprocessor, *args: Any) -> Any:
        assert may_end.wait(60)
        return inputs(self, *args)

    monkeypatch.setattr(PromptPreprocessor, "model_inputs", wait)
    with serving(engine, SOON) as site:
        asked = [engine.submit(ASKED) for _ in range(4)]
        wait_for(answers(site, 503, NO_PROMPT))
        may_end.set()
        assert {answer.finish().finish_reason for answer in asked} <= {"stop", "length"}
        wait_for(answers(site, 200, "ok"))
    assert engine.metrics().prepare_seconds == 0.0


def test_step_is_as_long_as_it_takes_where_no_limit_is_set(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, ServingConfig(max_step_s=None)) as site, held_steps(monkeypatch):
        answer = engine.submit(ASKED)
        wait_for(lambda: engine.step_seconds > 0.05)
        assert site.request("GET", "/health")[:2] == (200, "ok")
        answer.cancel()


def test_each_step_is_timed_by_itself(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of many steps takes long, and nothing hangs."""
    assert engine._core is not None
    watch, step = engine._core._step, Scheduler.step
    now, seen = 0.0, list[float]()

    def slow(scheduler: Scheduler) -> Any:
        nonlocal now
        seen.append(engine.step_seconds)
        now += 100.0
        return step(scheduler)

    wait_for(lambda: not watch.runs)
    monkeypatch.setattr(watch, "_clock", lambda: now)
    monkeypatch.setattr(Scheduler, "step", slow)
    engine.submit(Request("Hi", sampling=SamplingParams(max_tokens=30, ignore_eos=True))).finish()
    wait_for(lambda: not watch.runs)
    assert len(seen) > 2
    assert set(seen) == {0.0}


def test_engine_without_work_is_at_no_step(engine: LLM) -> None:
    engine.submit(ASKED).finish()
    wait_for(lambda: engine.step_seconds == 0.0)
    assert engine.metrics().step_seconds == 0.0
    assert engine.stall(1e-9) is None


def test_engine_whose_answer_nobody_reads_is_at_no_step(engine: LLM) -> None:
    """It waits for the reader, and for nothing else."""
    answer = engine.submit(Request("Hi", sampling=SamplingParams(max_tokens=200, ignore_eos=True)))
    wait_for(lambda: answer.lagging)
    wait_for(lambda: engine.step_seconds == 0.0)
    answer.cancel()


def test_engine_that_has_not_begun_or_has_ended_is_at_no_step(bundle: Path) -> None:
    engine = LLM(bundle)
    assert engine.step_seconds == 0.0
    engine.start()
    engine.close()
    assert engine.step_seconds == 0.0


def _told(step_seconds: float, prepare_seconds: float = 0.0) -> Metrics:
    names = ("running", "waiting", "preempted", "reused_tokens")
    pages = ("kv_pages_used", "kv_pages_cached", "kv_pages_total")
    now = dict.fromkeys((*names, *pages), 0)
    return Metrics(Meter(0.0).snapshot(step_seconds, prepare_seconds, **now))


def test_engine_elsewhere_is_judged_by_its_last_answer_and_by_how_long_it_owes_one() -> None:
    now, sent = 0.0, list[Any]()
    engine = object.__new__(RemoteEngine)
    engine._news = threading.Condition()
    engine._channel = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    engine._num_metrics = 0
    engine._owed = Stopwatch(lambda: now)
    engine._hear(_told(0.0))

    assert engine.stall(120) is None
    now = 120.0
    assert engine.stall(120) is None
    assert sent == [GetMetrics()], "one question at a time"
    now = 131.0
    assert engine.stall(120) == f"{SILENT}131 s"

    engine._hear(_told(130.4))
    assert engine.stall(120) == f"{NO_STEP}130 s"
    engine._hear(_told(0.2, 125.4))
    assert engine.stall(120) == f"{NO_PROMPT}125 s"
    engine._hear(_told(0.2))
    assert engine.stall(120) is None
    assert sent == [GetMetrics()] * 4


def hanging_llm(bundle: Path, hang: Path) -> LLM:
    """As an engine's process opens it: no step ends while there is a file ``hang``."""
    step = Scheduler.step

    def wait(scheduler: Scheduler) -> Any:
        while hang.exists():
            time.sleep(0.01)
        return step(scheduler)

    Scheduler.step = wait  # type: ignore[method-assign]  # in a process that ends with the test
    return LLM(bundle)


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hang") / "hang"


@pytest.fixture(scope="module")
def remote(bundle: Path, hang: Path) -> Iterator[RemoteEngine]:
    with RemoteEngine(EngineJob(partial(hanging_llm, bundle, hang), "error")) as engine:
        engine.attach(bundle)
        engine.wait_until_ready()
        yield engine


def test_step_that_does_not_end_in_another_process_is_seen(
    remote: RemoteEngine, hang: Path
) -> None:
    with serving(remote, SOON) as site:
        wait_for(answers(site, 200, "ok"))
        hang.touch()
        try:
            answer = remote.submit(ASKED)
            wait_for(answers(site, 503, NO_STEP))
            metric = next(
                line
                for line in site.request("GET", "/metrics")[1].splitlines()
                if line.startswith("trt_eagle3_step_seconds{")
            )
            assert float(metric.split()[-1]) > 0.05
        finally:
            hang.unlink()
        assert answer.finish().finish_reason is not None
        wait_for(answers(site, 200, "ok"))


def test_process_that_stands_still_is_seen(remote: RemoteEngine) -> None:
    """Though it has nothing to do: it would not begin."""
    with serving(remote, SOON) as site:
        wait_for(answers(site, 200, "ok"))
        os.kill(remote._process.pid, signal.SIGSTOP)
        try:
            wait_for(answers(site, 503, SILENT))
        finally:
            os.kill(remote._process.pid, signal.SIGCONT)
        wait_for(answers(site, 200, "ok"))
        assert remote.submit(ASKED).finish().finish_reason is not None


@pytest.mark.parametrize("value", [0, -1, float("nan"), "soon"])
def test_limit_of_a_step_is_a_number_of_seconds_or_null(value: object) -> None:
    with pytest.raises(UserError, match="max_step_s: "):
        ServingConfig.from_mapping({"max_step_s": value}, "--set")
    assert ServingConfig.from_mapping({"max_step_s": None}, "--set").max_step_s is None
