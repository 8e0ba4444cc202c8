"""Requests from many threads and event loops at once: answered, refused, cancelled, and all
pages back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.decode.scheduling import TreeFor
from tests.decode.steps import held_steps
from tests.multimodal.bombs import children, encode, endless_jpeg
from tests.tiny import build_tiny
from tests.waiting import wait_for
from trt_eagle3 import LLM, Chunk, Request, SamplingParams, load
from trt_eagle3.decode import loaded_bundle
from trt_eagle3.decode.core import EngineCore
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.policy.protocol import BatchState
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.output import Output
from trt_eagle3.decode.request.preprocess import PromptPreprocessor
from trt_eagle3.decode.request.vision_encoder import VisionEncoder
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.logits_process import History
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.tree import AnyTree, configured_tree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.errors import (
    ClosedError,
    EngineFailedError,
    OverloadedError,
    RequestCancelledError,
    UserError,
)
from trt_eagle3.multimodal import MediaPolicy
from trt_eagle3.multimodal.caller import Caller
from trt_eagle3.multimodal.decoder_pool import DecoderPool, _Process

PROMPTS = [f"What is {i} plus {3 * i + 1}?" for i in range(10)]
NUM_LONG = 200
LONG = SamplingParams(max_tokens=NUM_LONG, ignore_eos=True)
TWO = SamplingParams(max_tokens=2)
LIMITS = {"max_batch_size": 4, "max_seq_len": 512, "max_waiting": 6}


SMALL = encode(Image.new("RGB", (64, 64), "red"))
SLOW = endless_jpeg()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits=LIMITS)


@pytest.fixture
def engine(bundle: Path) -> Iterator[LLM]:
    engine = load(bundle)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(bundle: Path) -> list[str]:
    engine = load(bundle)
    texts = [engine.generate(prompt).text for prompt in PROMPTS]
    engine.close()
    assert len(set(texts)) == len(texts)
    return texts


def decoding_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "trt-eagle3-decode"}


def settle(engine: LLM) -> None:
    """Wait until nobody is served, and every page but cached ones is free."""

    def settled() -> bool:
        now = engine.metrics()
        # a sequence that ends leaves before its pages
        return not (now.running or now.waiting or now.kv_pages_used)

    wait_for(settled)


def endless(**options: Any) -> Request:
    """An answer that does not come to its end before it is read, or its end waited for."""
    return Request(PROMPTS[0], sampling=LONG, **options)


def test_async_answers_of_many_requests_are_those_of_each_alone(
    engine: LLM, expected: list[str]
) -> None:
    async def ask(prompt: str) -> str:
        while True:
            try:
                answer = engine.submit(Request(prompt))
            except OverloadedError:
                await asyncio.sleep(0.01)
                continue
            chunks = [chunk async for chunk in answer]
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish_reason == "stop"
            assert sum((chunk.token_ids for chunk in chunks), ()) == answer.generation.token_ids
            return "".join(chunk.text for chunk in chunks)

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*map(ask, PROMPTS))

    assert asyncio.run(all_at_once()) == expected
    settle(engine)


def answers_at_once(engine: LLM, count: int) -> list[str]:
    """What the first prompts are answered, each asked by a thread, all at the same moment."""
    start = threading.Barrier(count)
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        start.wait()
        found[index] = engine.generate(PROMPTS[index]).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[i] for i in range(count)]


def test_threads_ask_at_once(engine: LLM, expected: list[str]) -> None:
    assert answers_at_once(engine, 6) == expected[:6]


def test_requests_asked_together_are_all_there_for_the_next_pass(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, step = [], Scheduler.step

    def counted(self: Scheduler) -> Any:
        waiting.append(len(self.waiting))
        return step(self)

    monkeypatch.setattr(Scheduler, "step", counted)
    requests = [Request(prompt) for prompt in PROMPTS[: LIMITS["max_waiting"]]]
    answers = engine._started().submit_together(requests)
    assert [answer.finish().text for answer in answers] == expected[: len(requests)]
    assert waiting[0] == len(requests)
    settle(engine)


def test_too_many_asked_together_are_refused_and_those_before_are_answered(engine: LLM) -> None:
    with pytest.raises(OverloadedError, match="6 requests wait already"):
        engine._started().submit_together([endless() for _ in PROMPTS])
    settle(engine)
    assert engine.metrics().requests == {"cancelled": LIMITS["max_waiting"]}, (
        "nobody holds their answers"
    )


def test_request_past_the_queue_is_refused_and_the_others_are_answered(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Answer] = []

    def ask_on() -> None:
        for _ in range(40):
            answers.append(engine.submit(endless()))

    with held_steps(monkeypatch):
        with pytest.raises(OverloadedError, match=r"requests wait already \(limits.max_waiting\)"):
            ask_on()
        assert len(answers) >= LIMITS["max_waiting"]
        for answer in answers[1:]:
            answer.cancel()
    assert answers[0].finish().finish_reason == "length"
    assert all(answer.wait(30) for answer in answers)
    assert all(len(answer.generation.token_ids) < NUM_LONG for answer in answers[1:])
    settle(engine)


@pytest.mark.parametrize(
    "stuck",
    [(PromptPreprocessor, "run"), (EngineCore, "_turn")],
    ids=["to be prepared", "for a pass"],
)
def test_as_many_may_wait_as_the_limit_says(
    engine: LLM, monkeypatch: pytest.MonkeyPatch, stuck: tuple[type, str]
) -> None:
    may_go, real = threading.Event(), getattr(*stuck)

    def when_told(*args: Any) -> Any:
        may_go.wait()
        return real(*args)

    monkeypatch.setattr(*stuck, when_told)
    answers = [engine.submit(Request(prompt)) for prompt in PROMPTS[: LIMITS["max_waiting"]]]
    while stuck[0] is EngineCore and engine._core._num_preparing:
        time.sleep(0.001)
    with pytest.raises(OverloadedError, match="6 requests wait already"):
        engine.submit(Request(PROMPTS[0]))
    may_go.set()
    assert {answer.finish().finish_reason for answer in answers} == {"stop"}


def test_cancel_at_any_point_ends_the_answer_and_frees_its_pages(engine: LLM) -> None:
    for delay in (0, 0.001, 0.005, 0.02, 0.05):
        answer = engine.submit(endless())
        time.sleep(delay)
        answer.cancel()
        assert answer.wait(30)
        assert len(answer.generation.token_ids) < NUM_LONG
    settle(engine)
    assert engine.metrics().requests == {"cancelled": 5}


def test_leaving_an_async_iteration_cancels(engine: LLM) -> None:
    async def leave() -> None:
        answer = engine.submit(endless())
        chunks = aiter(answer)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        while not answer.over:
            await asyncio.sleep(0.01)
        assert answer.generation.finish_reason == "cancelled"

    asyncio.run(leave())
    settle(engine)


def test_iteration_that_the_decoding_thread_collects_ends_its_request_and_nobody_waits(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left in a reference cycle, as by an error with a traceback, an iteration ends in whatever
    thread collects it.
    """
    step = Scheduler.step

    def collect(self: Scheduler) -> Any:
        gc.collect()
        return step(self)

    cycle: list[Any] = [iter(engine.submit(endless()))]
    cycle.append(cycle)
    next(cycle[0])
    gc.disable()
    try:
        del cycle
        monkeypatch.setattr(Scheduler, "step", collect)
        answer = engine.submit(Request(PROMPTS[1]))
        assert answer.wait(30), "the thread that decodes waits for itself"
    finally:
        gc.enable()
    assert answer.finish().text == expected[1]
    settle(engine)
    assert engine.metrics().requests == {"cancelled": 1, "stop": 1}


def test_reader_that_stalls_makes_its_sequence_wait_and_nobody_else(
    engine: LLM, expected: list[str]
) -> None:
    slow = engine.submit(endless(speculation=False))
    wait_for(lambda: slow.lagging)
    assert engine.generate(PROMPTS[1]).text == expected[1]
    unread = len(slow._chunks)
    time.sleep(0.1)
    assert len(slow._chunks) == unread < 100
    assert len(slow.finish().token_ids) == NUM_LONG


def test_answers_that_are_not_read_leave_the_queue_to_others(
    engine: LLM, expected: list[str]
) -> None:
    """Those that were preempted for others do not wait: the queue is free, until they are as
    many as may wait.
    """

    def stall() -> Answer:
        answer = engine.submit(endless(speculation=False))
        wait_for(lambda: answer.lagging)
        return answer

    unread = [stall() for _ in range(LIMITS["max_batch_size"] + 2)]
    wait_for(lambda: engine.metrics().waiting == 0)
    assert engine.generate(PROMPTS[1]).text == expected[1]
    with pytest.raises(OverloadedError, match=r"answers are not read \(limits.max_waiting\)"):
        unread.extend(stall() for _ in range(LIMITS["max_waiting"] + 1))
    assert len(unread[0].finish().token_ids) == NUM_LONG
    unread.clear()
    settle(engine)
    assert engine.generate(PROMPTS[1]).text == expected[1]


def test_waiting_for_the_end_of_a_long_answer_is_no_lag(engine: LLM) -> None:
    answer = engine.submit(endless(speculation=False))
    assert answer.wait(30)
    assert len(answer.finish().token_ids) == NUM_LONG


def test_error_of_a_prompt_comes_out_of_its_iterator_only(engine: LLM, expected: list[str]) -> None:
    bad = engine.submit(Request("word " * 2000))
    good = engine.submit(Request(PROMPTS[2]))
    with pytest.raises(UserError, match="the limit is 511"):
        bad.finish()
    assert good.finish().text == expected[2]
    assert engine.metrics().requests == {"stop": 1, "rejected": 1}


def test_refusal_that_is_kept_holds_nothing_of_its_request(engine: LLM) -> None:
    image = Image.new("RGB", (64, 64))
    held = weakref.ref(image)
    gc.collect()
    gc.disable()
    try:
        answer = engine.submit(Request("x " * 2000, images=[image]))
        del image
        answer.wait()
        assert isinstance(answer.error, UserError)
        wait_for(lambda: held() is None, 5)
    finally:
        gc.enable()


def test_pass_that_fails_ends_all_it_was_for_and_the_engine_goes_on(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [engine.submit(endless()) for _ in range(3)]
    reading = iter(answers[0])
    next(reading)

    def fail(*_: Any) -> Any:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", fail)
        for answer in answers:
            with pytest.raises(RuntimeError, match="decoding failed: MemoryError: no more"):
                answer.finish()
    settle(engine)
    assert engine.generate(PROMPTS[3]).text == expected[3]


@pytest.mark.parametrize("gpu_works", [True, False])
def test_pass_that_fails_ends_the_engine_where_its_gpu_does_nothing_more(
    engine: LLM, monkeypatch: pytest.MonkeyPatch, gpu_works: bool
) -> None:
    """After an illegal access every call of CUDA fails, until the process ends."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    answer = engine.submit(endless())
    reading = iter(answer)
    next(reading)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(LoadedBundle, "device", "cuda")
        patch.setattr(torch.cuda, "synchronize", (lambda: None) if gpu_works else fail)
        patch.setattr(Decoder, "step", fail)
        with pytest.raises(RuntimeError, match="decoding failed: RuntimeError: CUDA error: an il"):
            answer.finish()
        if not gpu_works:
            wait_for(lambda: not engine.ready)
    assert engine.ready is gpu_works


def test_pass_that_fails_ends_nobody_who_waits(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    worker, step = engine._core, Decoder.step
    scheduler = worker.scheduler
    failed = threading.Event()

    def fail_once(self: Decoder, *args: Any) -> Any:
        """When everybody is there; until then a step only lets the next ones come."""
        if (
            len(scheduler.running) == LIMITS["max_batch_size"]
            and scheduler.waiting
            and not failed.is_set()
        ):
            failed.set()
            raise MemoryError("no more")
        while not (worker._inbox or failed.is_set()):
            time.sleep(0.001)
        return step(self, *args)

    monkeypatch.setattr(Decoder, "step", fail_once)
    running = [engine.submit(endless()) for _ in range(LIMITS["max_batch_size"])]
    while len(scheduler.running) < len(running):
        time.sleep(0.001)
    waiting = [engine.submit(Request(prompt)) for prompt in PROMPTS[:3]]
    for answer in running:
        with pytest.raises(RuntimeError, match="decoding failed: MemoryError: no more"):
            answer.finish()
    assert [answer.finish().text for answer in waiting] == expected[:3]
    settle(engine)


def test_thread_that_dies_tells_everybody_who_still_reads(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(bundle)
    left, held = engine.submit(endless()), engine.submit(endless())
    leaving, reading = iter(left), iter(held)
    next(leaving), next(reading)
    dying, may_die = threading.Event(), threading.Event()

    def die(_: EngineCore) -> None:
        dying.set()
        may_die.wait()
        raise SystemExit("told to")

    monkeypatch.setattr(EngineCore, "_turn", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert dying.wait(30)
    del left, leaving  # nobody hears of its end
    gc.collect()
    may_die.set()
    assert held.wait(30)
    with pytest.raises(RuntimeError, match="decoding failed: SystemExit: told to"):
        held.finish()
    wait_for(lambda: not engine.ready)
    assert [record.message for record in caplog.records] == ["the decoding thread died"]
    engine.close()


def test_closing_prepares_nothing_more(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prepare = load(bundle), PromptPreprocessor.model_inputs
    prepared = threading.Semaphore(0)
    begun: list[Request] = []

    def slowly(self: PromptPreprocessor, request: Request, caller: Caller) -> Any:
        begun.append(request)
        prepared.acquire()
        return prepare(self, request, caller)

    monkeypatch.setattr(PromptPreprocessor, "model_inputs", slowly)
    answers = [engine.submit(endless()) for _ in range(6)]
    engine.close()
    prepared.release(6)
    assert all(answer.wait(30) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {"cancelled"}
    assert len(begun) <= 2, "as many as there are threads"


def test_closed_engine_cancels_what_is_in_flight_and_takes_no_more(bundle: Path) -> None:
    engine = load(bundle)
    answers = [engine.submit(endless()) for _ in range(6)]
    reading = iter(answers[0])
    assert next(reading).token_ids  # of one, passes have begun
    assert engine.ready
    engine.close()
    assert all(answer.wait(30) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {"cancelled"}
    assert not engine.ready
    with pytest.raises(ClosedError, match="this LLM is closed"):
        engine.submit(endless())


def test_draining_answers_what_is_in_flight(bundle: Path, expected: list[str]) -> None:
    engine = load(bundle)
    answers = [engine.submit(Request(prompt)) for prompt in PROMPTS[:5]]
    engine.close(drain=True)
    assert [answer.finish().text for answer in answers] == expected[:5]


def test_draining_waits_for_no_reader(bundle: Path) -> None:
    """Whoever drains cannot read: long answers come to their end all the same."""
    engine = load(bundle)
    answers = [engine.submit(endless(speculation=False)) for _ in range(2)]
    closing = threading.Thread(target=engine.close, kwargs={"drain": True}, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert [len(answer.finish().token_ids) for answer in answers] == [NUM_LONG] * 2


def test_engine_that_nobody_holds_ends_its_thread(bundle: Path) -> None:
    engine = load(bundle)
    before = decoding_threads()
    engine.generate(PROMPTS[0])
    (thread,) = decoding_threads() - before
    del engine
    thread.join(30)
    assert not thread.is_alive()


def test_chunks_are_no_longer_than_a_pass(engine: LLM) -> None:
    chunks: list[Chunk] = list(engine.stream(PROMPTS[0]))
    assert len(chunks) >= 3
    assert all(len(chunk.token_ids) <= 6 for chunk in chunks)


def test_metrics_add_up(engine: LLM) -> None:
    done = [engine.generate(prompt) for prompt in PROMPTS[:4]]
    image = Image.new("RGB", (64, 64), "red")
    done.append(engine.generate("What is in the picture?", images=[image], max_tokens=5))
    now = engine.metrics()
    assert now.generated_tokens == sum(len(g.token_ids) for g in done)
    assert now.prompt_tokens == sum(g.prompt_tokens for g in done)
    assert now.cycles == sum(g.num_forwards for g in done)
    assert now.proposed[0] == sum(len(g.accepted_lengths) for g in done)
    assert now.first_token_seconds.count == now.queue_seconds.count == len(done)
    assert 0 < now.queue_seconds.total < now.first_token_seconds.total
    assert now.token_seconds.count == now.generated_tokens - len(done)
    assert sum(now.requests.values()) == len(done)
    assert 1 < (now.acceptance_length or 0) <= 6
    assert now.speculation_on


def test_acceptance_length_of_an_answer_is_of_the_forwards_that_verified_drafts(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine's metrics count them, where only some forwards have a draft."""
    scheduler = engine._started().scheduler
    tree = configured_tree(engine.bundle.record.config.speculation)

    def every_third_token(_batch: BatchState) -> AnyTree | None:
        return tree if all(len(s.tokens) % 3 == 0 for s in scheduler.running) else None

    monkeypatch.setattr(scheduler, "policy", TreeFor(every_third_token))
    found = engine.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    now = engine.metrics()
    assert 0 < len(found.accepted_lengths) == now.proposed[0] < found.num_forwards == now.cycles
    assert found.acceptance_length == sum(found.accepted_lengths) / now.proposed[0]
    emitted = now.proposed[0] + sum(now.accepted)
    assert emitted - 5 <= sum(found.accepted_lengths) <= emitted, "the last forward's may not fit"


@pytest.mark.parametrize(("drafted", "expected"), [(5, 5), (0, 0), (None, 5)])
def test_metrics_show_what_the_last_cycle_drafted(
    engine: LLM, monkeypatch: pytest.MonkeyPatch, drafted: int | None, expected: int
) -> None:
    """A step without a cycle says nothing of it."""
    engine.generate(PROMPTS[0], max_tokens=2)
    engine.restart_metrics()
    scheduler = engine._core.scheduler
    monkeypatch.setattr(scheduler, "step", list)
    monkeypatch.setattr(scheduler, "num_draft_tokens", drafted)
    engine._core._turn()  # its own thread sleeps: there is nothing to do
    now = engine.metrics()
    assert (now.draft_tokens, now.speculation_on) == (expected, expected > 0)
    assert now.draft_tokens_per_cycle.count == (drafted is not None)
    assert now.plain_cycles == (drafted == 0)


def test_request_whose_images_are_looked_at_counts(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_images, counted = VisionEncoder.encode, list[int]()

    def count(self: VisionEncoder, prompt: Any) -> Any:
        now = engine.metrics()
        counted.append(now.running + now.waiting)
        return encode_images(self, prompt)

    monkeypatch.setattr(VisionEncoder, "encode", count)
    engine.generate(
        "What is in the picture?", images=[Image.new("RGB", (64, 64), "red")], max_tokens=2
    )
    assert counted == [1]


def test_text_does_not_wait_while_images_are_prepared(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, ready = PromptPreprocessor.run, threading.Event()

    def slowly(self: PromptPreprocessor, request: Request, caller: Caller) -> Any:
        if request.has_media:
            assert ready.wait(60)
        return prepare(self, request, caller)

    monkeypatch.setattr(PromptPreprocessor, "run", slowly)
    image = Image.new("RGB", (64, 64), "red")
    images = [
        engine.submit(Request("What is this?", images=[image], sampling=TWO)) for _ in range(4)
    ]
    assert engine.generate(PROMPTS[0]).text == expected[0]
    ready.set()
    assert {answer.finish().finish_reason for answer in images} == {"length"}


def decoders_at_work(engine: LLM) -> int:
    """Processes that decode a picture, or are about to."""
    decoders = engine.bundle.processor.decoders
    assert decoders is not None
    return decoders._turns._held_by_client.total()


def picture_of(data: bytes, client: str = "") -> Request:
    return Request("What is this?", images=[data], sampling=TWO, client=client)


def test_known_grammars_and_texts_do_not_wait_for_new_grammars(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SamplingParams(max_tokens=4, grammar=Grammar.json_object())
    text = engine.generate(PROMPTS[0], sampling=known).text
    may_end = threading.Event()

    def slow(_: bytes, cancelled: Callable[[], bool]) -> dict[str, Any]:
        wait_for(lambda: may_end.is_set() or cancelled())
        if cancelled():
            raise RequestCancelledError
        return {"slow": 1.0}

    monkeypatch.setattr(engine.bundle.grammars._worker, "ask", slow)
    asked = [
        engine.submit(
            Request("Hi", sampling=SamplingParams(grammar=Grammar.regex(f"a{i}")), client=client)
        )
        for i, client in enumerate("aaaab")
    ]
    assert engine.generate(PROMPTS[0], sampling=known).text == text
    assert engine.generate(PROMPTS[1]).text == expected[1]
    assert not any(answer.over for answer in asked)
    asked[0].cancel()
    asked[1].cancel()
    assert [answer.finish().finish_reason for answer in asked[:2]] == ["cancelled"] * 2
    may_end.set()
    for answer in asked[2:]:
        with pytest.raises(UserError, match=r"regex: takes 1\.00 s for a token"):
            answer.finish()
    settle(engine)


class PanicException(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("kind", [PanicException, SystemExit])
def test_preparation_that_panics_fails_alone_and_loses_no_thread(
    engine: LLM,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
) -> None:
    def panic(*_: object, **__: object) -> Any:
        raise kind("retry-limit over")

    with monkeypatch.context() as patch:
        patch.setattr(PromptPreprocessor, "model_inputs", panic)
        for _ in range(5):
            with pytest.raises(EngineFailedError, match=f"^{kind.__name__}: retry-limit over$"):
                engine.submit(Request("Hi")).finish()
    settle(engine)
    assert engine.metrics().prepare_seconds == 0.0
    assert [engine.generate(prompt).text for prompt in PROMPTS[:3]] == expected[:3]


def test_step_that_panics_ends_all_it_was_for_and_the_engine_goes_on(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> Any:
        raise PanicException("index out of bounds")

    answer = engine.submit(endless())
    reading = iter(answer)
    next(reading)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", panic)
        with pytest.raises(EngineFailedError, match=r"^PanicException: index out of bounds$"):
            answer.finish()
    settle(engine)
    assert engine.generate(PROMPTS[3]).text == expected[3]


@pytest.mark.parametrize(
    "sampling", [TWO, SamplingParams(max_tokens=2, grammar=Grammar.regex("ab"))]
)
def test_request_that_no_thread_prepares_is_refused_and_not_counted(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    def fail(_: ThreadPoolExecutor) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", fail)
        for _ in range(2 * LIMITS["max_waiting"]):
            with pytest.raises(OverloadedError, match=r"can't start new thread.*Try again later"):
                engine.submit(Request("Hi", sampling=sampling))
    now = engine.metrics()
    assert (now.waiting, now.running, now.prepare_seconds) == (0, 0, 0.0)
    assert engine.generate(PROMPTS[2]).text == expected[2]
    settle(engine)


def test_cancelled_request_is_answered_while_its_images_are_decoded(engine: LLM) -> None:
    """As ``max_request_s`` and clients that hang up cancel it."""
    engine.submit(picture_of(SMALL)).finish()
    answer = engine.submit(picture_of(SLOW))
    wait_for(lambda: decoders_at_work(engine) == 1)
    start = time.monotonic()
    answer.cancel()
    assert answer.wait(30)
    assert time.monotonic() - start < 8, "of half a minute or more"
    assert answer.finish().finish_reason == "cancelled"
    assert engine.submit(picture_of(SMALL)).finish().finish_reason == "length"
    settle(engine)


def test_images_of_one_client_hold_nobody_else(engine: LLM) -> None:
    engine.submit(picture_of(SMALL)).finish()
    slow = [engine.submit(picture_of(SLOW, "greedy")) for _ in range(4)]
    wait_for(lambda: decoders_at_work(engine) > 1)
    assert engine.submit(picture_of(SMALL, "modest")).finish().finish_reason == "length"
    assert not any(answer.over for answer in slow)
    for answer in slow:
        answer.cancel()
    assert all(answer.wait(30) for answer in slow)
    settle(engine)


def test_picture_past_its_deadline_is_refused_and_decoding_goes_on(
    bundle: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, answered = _Process._receive, threading.Event()

    def late(*args: Any) -> Any:
        """Of a picture that is being decoded nothing is heard before the text is answered."""
        assert answered.wait(60)
        return receive(*args)

    monkeypatch.setattr(_Process, "_receive", late)
    policy = MediaPolicy(max_jpeg_scans=None, decode_timeout_s=0.3)
    engine = load(bundle, media=policy)
    engine.start()
    answer = engine.submit(picture_of(SLOW))
    wait_for(lambda: decoders_at_work(engine) == 1)
    assert engine.generate(PROMPTS[0]).text == expected[0]
    assert not answer.over, "steps wait for nobody's images"
    answered.set()
    with pytest.raises(UserError, match=r"not decoded within 0\.3 s"):
        answer.finish()
    assert engine.generate(PROMPTS[1]).text == expected[1]
    engine.close()


def test_closed_engine_leaves_no_decoder(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_bundle, "DecoderPool", DecoderPool)  # one of its own
    before = children()
    engine = load(bundle)
    answers = [engine.submit(picture_of(data)) for data in (SLOW, SMALL)]
    answers[1].finish()
    wait_for(lambda: len(children() - before) == 2)
    engine.close()
    assert all(answer.wait(30) for answer in answers)
    assert answers[0].finish().finish_reason == "cancelled"
    assert children() == before


def test_program_that_ends_after_its_last_answer_ends_cleanly(bundle: Path) -> None:
    """The engine goes with its last answer; neither may die in the thread that decodes."""
    program = (
        f"import trt_eagle3; print(trt_eagle3.load({str(bundle)!r}).generate('What is 3 plus 4?', "
        "stop=['plus']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "text='3 '" in ended.stdout


def test_engine_closed_before_its_first_request_takes_none(bundle: Path) -> None:
    engine = load(bundle)
    engine.close()
    with pytest.raises(ClosedError, match="this LLM is closed"):
        engine.generate(PROMPTS[0])


def test_first_requests_of_many_threads_begin_one_worker(bundle: Path, expected: list[str]) -> None:
    engine, before = load(bundle), decoding_threads()
    assert engine.metrics().waiting == 0
    assert decoding_threads() == before, "looking at the counters opens nothing"
    assert answers_at_once(engine, 4) == expected[:4]
    assert len(decoding_threads() - before) == 1
    engine.close()


def test_answers_that_nobody_holds_make_room_for_others(engine: LLM, expected: list[str]) -> None:
    for _ in range(LIMITS["max_batch_size"]):
        engine.submit(endless(speculation=False))
    asked = engine.submit(Request(PROMPTS[1]))
    assert asked.wait(30), "answers that nobody reads hold every place"
    assert asked.finish().text == expected[1]
    settle(engine)
    assert engine.metrics().requests["cancelled"] == LIMITS["max_batch_size"]


def test_loop_closed_under_its_reader_ends_that_answer_only(
    engine: LLM, expected: list[str]
) -> None:
    answer, loop = engine.submit(endless()), asyncio.new_event_loop()
    chunks = aiter(answer)
    loop.run_until_complete(anext(chunks))  # type: ignore[arg-type]
    loop.close()
    assert answer.wait(30)
    assert answer.finish_reason == "cancelled"
    assert engine.generate(PROMPTS[1]).text == expected[1]


def test_readers_in_two_loops_share_an_answer(engine: LLM) -> None:
    answer, counts = engine.submit(endless()), list[int]()

    async def read() -> int:
        return sum([len(chunk.token_ids) async for chunk in answer])

    threads = [
        threading.Thread(target=lambda: counts.append(asyncio.run(read())), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(counts) == 2
    assert sum(counts) == NUM_LONG


def test_closing_cannot_be_taken_back(bundle: Path) -> None:
    engine = load(bundle)
    answer = engine.submit(endless())
    engine.close()
    engine.close(drain=True)
    assert answer.finish().finish_reason == "cancelled"


def ask_and_wait(engine: LLM, work: Callable[[], int]) -> list[Any]:
    """Let a thread ask the one that decodes to do ``work``; what it is told is added later."""
    told: list[Any] = []

    def ask() -> None:
        try:
            told.append(engine._core._ask(work))
        except BaseException as error:
            told.append(error)

    threading.Thread(target=ask, daemon=True).start()
    return told


def test_thread_that_dies_tells_those_whose_tasks_wait(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``capture_graphs`` is such a task: its caller would wait for ever."""
    engine, may_die = load(bundle), threading.Event()
    engine.start()

    def die() -> int:
        assert may_die.wait(30)
        raise SystemExit("told to")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    asked = [ask_and_wait(engine, die)]
    wait_for(lambda: engine._core._tasks)
    asked.append(ask_and_wait(engine, lambda: 1))
    wait_for(lambda: len(engine._core._tasks) == 2)
    may_die.set()
    wait_for(lambda: all(asked))
    for (error,) in asked:
        assert isinstance(error, EngineFailedError)
        assert str(error) == "the decoding thread died (SystemExit: told to). Load it again."
    engine.close()


def test_closed_engine_tells_those_whose_tasks_wait(bundle: Path) -> None:
    engine, begun, may_end = load(bundle), threading.Event(), threading.Event()
    engine.start()

    def wait() -> int:
        begun.set()
        return may_end.wait(30) * 7

    first = ask_and_wait(engine, wait)
    assert begun.wait(30)
    second = ask_and_wait(engine, lambda: 8)
    wait_for(lambda: len(engine._core._tasks) == 2)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    wait_for(lambda: engine._core._closing)
    may_end.set()
    closing.join(30)
    wait_for(lambda: first and second)
    assert first == [7]
    assert isinstance(second[0], ClosedError)
    assert str(second[0]) == "the engine has stopped. Load it again."


def test_task_that_fails_tells_its_caller_and_the_engine_goes_on(
    engine: LLM, expected: list[str]
) -> None:
    engine.start()

    def fail() -> int:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        engine._core._ask(fail)
    assert engine._core._ask(lambda: 3) == 3
    assert engine.generate(PROMPTS[1]).text == expected[1]


def test_answer_whose_text_cannot_be_made_fails_alone(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Output.take

    def broken(self: Output, *args: Any, **options: Any) -> Chunk:
        if self._max_tokens == NUM_LONG and len(self.token_ids) > 3:
            raise KeyError("no such piece")
        return take(self, *args, **options)

    monkeypatch.setattr(Output, "take", broken)
    asked = engine._started().submit_together([endless(), *map(Request, PROMPTS[1:4])])
    with pytest.raises(RuntimeError, match="decoding failed: KeyError: 'no such piece'"):
        asked[0].finish()
    assert [answer.finish().text for answer in asked[1:]] == expected[1:4]
    settle(engine)
    assert engine.metrics().requests == {"error": 1, "stop": 3}
    assert engine.generate(PROMPTS[4]).text == expected[4]


def test_sink_that_fails_ends_its_answers_and_no_others(
    engine: LLM, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    there, news = list[Answer](), list[Answer]()

    def broken(_: Sequence[Answer]) -> None:
        if there:
            raise OSError("the other end is gone")

    asked = engine._started().submit_together([endless(), *map(Request, PROMPTS[1:4])])
    asked[0].send_to(broken)
    asked[1].send_to(news.extend)
    there.append(asked[0])
    assert asked[0].wait(30)
    assert "decoding failed: OSError: the other end is gone" in str(asked[0].error)
    assert [answer.finish().text for answer in asked[1:]] == expected[1:4]
    assert set(news) == {asked[1]}
    settle(engine)
    assert engine.metrics().requests == {"error": 1, "stop": 3}
    assert "a sink of answers failed" in {record.message for record in caplog.records}


def test_request_whose_logits_cannot_be_processed_fails_alone(
    engine: LLM, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(History, "penalise", broken)
    penalised = dataclasses.replace(LONG, presence_penalty=0.5)
    asked = engine._started().submit_together(
        [Request(PROMPTS[0], sampling=penalised), *map(Request, PROMPTS[1:4])]
    )
    with pytest.raises(EngineFailedError, match=r"cannot be processed \(IndexError: index 7"):
        asked[0].finish()
    assert [answer.finish().text for answer in asked[1:]] == expected[1:4]
    settle(engine)
    assert engine.metrics().requests == {"error": 1, "stop": 3}
