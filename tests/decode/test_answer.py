"""Answers: who reads them is woken once for a step, and once for an end that is waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trt_eagle3.decode.delivery import CANCELLED
from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.decode.sampling.logprobs import TokenLogprob

CHUNKS = [Chunk((1,), "a"), Chunk((2, 3), "bc"), Chunk((4,), "d", "stop")]


def make(count: int = 1) -> list[Answer]:
    return [Answer(lambda: None) for _ in range(count)]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 5])
def test_loop_is_called_once_for_all_that_read_in_it(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = make(count)
    read: list[list[Chunk]] = [[] for _ in answers]
    calls = 0

    async def reader(answer: Answer, found: list[Chunk]) -> None:
        async for chunk in answer:
            found.append(chunk)

    async def run() -> None:
        nonlocal calls
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*words: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(*words)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        tasks = [
            asyncio.ensure_future(reader(a, found)) for a, found in zip(answers, read, strict=True)
        ]
        await until(lambda: all(a._loop_readers for a in answers))
        for step, chunk in enumerate(CHUNKS, 1):
            for answer in answers:
                answer.put(chunk)
                if chunk.finish_reason:
                    answer.end()
            for _ in range(5):  # nobody is told of a chunk before all are
                await asyncio.sleep(0)
            assert all(len(found) == step - 1 for found in read)
            wake_readers(answers)
            await until(lambda step=step: all(len(found) == step for found in read))
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert read == [CHUNKS] * count
    assert calls == len(CHUNKS)


def test_reader_whose_loop_was_closed_has_left_and_others_are_woken() -> None:
    left, there = make(2)
    closed = asyncio.new_event_loop()
    reading = aiter(left)
    closed.run_until_complete(_begin(left, reading))
    closed.close()

    async def read() -> list[Chunk]:
        return [chunk async for chunk in there]

    async def run() -> list[Chunk]:
        task = asyncio.ensure_future(read())
        await until(lambda: bool(there._loop_readers))
        there.put(CHUNKS[2])
        there.end()
        wake_readers([left, there])
        return await task

    assert asyncio.run(run()) == [CHUNKS[2]]
    assert (left.cancelled, there.cancelled) == (True, False)


async def _begin(answer: Answer, reading: Any) -> None:
    """Read a chunk, and stay."""
    answer.put(CHUNKS[0])
    assert await anext(reading) == CHUNKS[0]


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_chunks_that_wait_become_one_and_what_is_cancelled_stays_apart(waiting: int) -> None:
    (answer,) = make()
    for chunk in (CHUNKS[0], *[CHUNKS[1]] * waiting, CANCELLED):
        answer.put(chunk)
    answer.end()
    reading = iter(answer)
    joined = answer.with_waiting(next(reading))
    assert joined.token_ids == (1, *[2, 3] * waiting)
    assert (joined.text, joined.finish_reason) == ("a" + "bc" * waiting, None)
    assert list(reading) == [CANCELLED]


@pytest.mark.parametrize(
    ("lengths", "expected"), [([None, 3, None, 2], 2.5), ([3, None], 3.0), ([None, None], None)]
)
def test_acceptance_length_leaves_out_forwards_without_a_draft(
    lengths: Sequence[int | None], expected: float | None
) -> None:
    (answer,) = make()
    answer.put(CHUNKS[0])  # the prompt's token
    for n in lengths:
        answer.put(Chunk((1,) * (n or 1), "a", accepted_lengths=() if n is None else (n,)))
    found = answer.generation
    assert found.acceptance_length == expected
    assert found.accepted_lengths == tuple(n for n in lengths if n is not None)


def test_joined_chunks_keep_order_end_and_logprobs() -> None:
    logprobs = [TokenLogprob(i, -float(i)) for i in range(3)]
    first, last = (
        Chunk((0,), "a", None, (logprobs[0],), (1,)),
        Chunk((1, 2), "b", "stop", (*logprobs[1:],), (2,)),
    )
    assert Chunk.joined([first, last]) == Chunk((0, 1, 2), "ab", "stop", (*logprobs,), (1, 2))


def test_reader_that_takes_all_that_waits_has_caught_up() -> None:
    woken: list[bool] = []
    answer = Answer(lambda: woken.append(True))
    for _ in range(40):
        answer.put(CHUNKS[0])
    assert answer.lagging
    reading = iter(answer)
    assert len(answer.with_waiting(next(reading)).token_ids) == 40
    assert not answer.lagging
    assert woken == [True], "the core looks at it again"


def test_sink_takes_what_there_is_and_hears_of_a_step_once() -> None:
    answers, heard = make(3), list[list[Answer]]()

    def sink(news: Sequence[Answer]) -> None:
        heard.append(list(news))

    for answer in answers:
        answer.send_to(sink)
    assert heard == [[answer] for answer in answers], "what came before is taken at once"
    heard.clear()
    for answer in answers:
        answer.put(CHUNKS[0])
    answers[0].end()
    wake_readers(answers)
    assert heard == [answers]
    assert [a.take() for a in answers] == [([CHUNKS[0]], a is answers[0]) for a in answers]
    assert answers[1].take() == ([], False)


def test_end_of_an_answer_with_a_sink_wakes_who_waits_for_it() -> None:
    (answer,) = make()
    answer.send_to(lambda _: None)
    waiting = threading.Thread(target=answer.wait, daemon=True)
    waiting.start()
    while not answer._num_awaiting:
        time.sleep(0.001)
    answer.put(CHUNKS[2])
    answer.end()
    wake_readers([answer])
    waiting.join(30)
    assert not waiting.is_alive()


def test_sink_that_fails_leaves_the_others_their_news() -> None:
    answers, heard = make(3), list[list[Answer]]()
    broken = iter([None])

    def failing(_: Sequence[Answer]) -> None:
        next(broken)  # at the second call: StopIteration

    answers[0].send_to(failing)
    answers[1].send_to(heard.append)
    heard.clear()
    waiting = threading.Thread(target=answers[2].wait, daemon=True)
    waiting.start()
    for answer in answers:
        answer.put(CHUNKS[0])
        answer.end()
    wake_readers(answers)
    waiting.join(30)
    assert heard == [[answers[1]]]
    assert not waiting.is_alive()
    assert [type(answer.failure) for answer in answers] == [StopIteration, type(None), type(None)]
