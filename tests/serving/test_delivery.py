"""Answers on their way to a client: however the response ends, they end with it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import pytest
from starlette.requests import ClientDisconnect

from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.serving.delivery import interleaved
from trt_eagle3.serving.front import _EventStream


@pytest.fixture(autouse=True)
def no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def begun(count: int) -> list[Answer]:
    """Answers that have said something, and go on."""
    answers = [Answer(lambda: None) for _ in range(count)]
    for answer in answers:
        answer.put(Chunk((1,), "a"))
    return answers


@pytest.mark.parametrize("count", [1, 2])
def test_chunks_closed_early_leave_no_reader(count: int) -> None:
    answers = begun(count)

    async def run() -> list[list[Any]]:
        chunks = interleaved(answers, 60.0)
        await anext(chunks)
        await chunks.aclose()
        return [list(answer._loop_readers) for answer in answers]

    assert asyncio.run(run()) == [[]] * count
    assert all(answer.cancelled for answer in answers)


def test_stream_whose_client_left_before_it_began_cancels_its_answer() -> None:
    [answer] = begun(1)

    async def events() -> AsyncIterator[str]:
        yield "never sent"

    async def gone(_: Any) -> NoReturn:
        raise OSError("the client is gone")

    async def run() -> bool:
        chunks = interleaved([answer], 60.0)
        await anext(chunks)
        response = _EventStream(events(), chunks)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await response(scope, gone, gone)
        return answer.cancelled

    assert asyncio.run(run())
