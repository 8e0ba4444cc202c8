"""Merge the engine's answers into one stream of chunks, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.errors import OverloadedError
from trt_eagle3.serving.errors import error_object
from trt_eagle3.serving.openai.call import Reply

__all__ = ["Numbered", "events", "interleaved"]

_log = logging.getLogger("trt_eagle3")
_LATE_S = 5.0  # after cancelling an answer, before the server ends it without the engine

Numbered = tuple[int, Chunk]
"""An answer's index, and its new chunk."""


async def interleaved(
    answers: Sequence[Answer], seconds: float, *, apart: bool = False
) -> AsyncGenerator[Numbered]:
    """Yield chunks of ``answers`` as they arrive, within ``seconds``; leaving early cancels them.

    Waiting chunks are merged into one, unless ``apart``.

    Raises:
        TimeoutError: it took longer than ``seconds``.
        OverloadedError: cancelled from outside. Errors of an answer are raised too.
    """
    try:
        if len(answers) == 1:
            async with contextlib.aclosing(_within(answers[0], seconds, apart=apart)) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
        else:
            async with contextlib.aclosing(_merged(answers, seconds, apart=apart)) as numbered:
                async for item in numbered:
                    yield item
    finally:
        for answer in answers:
            if not answer.over:
                answer.cancel()


async def _merged(
    answers: Sequence[Answer], seconds: float, *, apart: bool
) -> AsyncGenerator[Numbered]:
    # size 1: a slow reader makes every answer wait, and none is read ahead
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(1)

    async def pump(index: int, answer: Answer) -> None:
        end: Exception | None = None
        try:
            async with contextlib.aclosing(_within(answer, seconds, apart=apart)) as chunks:
                async for chunk in chunks:
                    await queue.put((index, chunk))
        except Exception as error:  # raised again where the chunks are read
            end = error
        await queue.put((index, end))

    tasks = [asyncio.create_task(pump(i, answer)) for i, answer in enumerate(answers)]
    try:
        left = len(answers)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _within(answer: Answer, seconds: float, *, apart: bool) -> AsyncGenerator[Chunk]:
    """Yield an answer's chunks within ``seconds``.

    The deadline runs even if nothing reads: a client that does not read would keep its slot in the
    batch.
    """
    loop = asyncio.get_running_loop()
    end = loop.call_later(seconds, answer.cancel)
    late = loop.call_later(seconds + _LATE_S, _give_up, answer, seconds)
    try:
        async with contextlib.aclosing(aiter(answer)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason == "cancelled":
                    if loop.time() >= end.when():
                        raise _timeout(seconds)
                    raise OverloadedError(
                        "cancelled: the client disconnected, or the server is stopping."
                    )
                yield chunk if apart else answer.with_waiting(chunk)
    finally:
        end.cancel()
        late.cancel()
        if not answer.over:
            answer.cancel()


def _give_up(answer: Answer, seconds: float) -> None:
    """End an answer without the engine, since a forward may hang."""
    _log.error("the engine has not ended a request %g s after its deadline", _LATE_S)
    answer.end(_timeout(seconds))
    wake_readers([answer])


def _timeout(seconds: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {seconds:g} s.")


async def events(
    reply: Reply, answers: Sequence[Answer], first: Numbered, chunks: AsyncGenerator[Numbered]
) -> AsyncIterator[str]:
    """Yield server-sent events. The caller closes ``chunks``, which cancels the answers."""
    try:
        yield reply.opening()
        if event := reply.piece(*first):
            yield event
        async for index, chunk in chunks:
            # no event for half a character, or for the beginning of a stop text
            if event := reply.piece(index, chunk):
                yield event
        yield reply.closing([answer.generation for answer in answers])
    except Exception as error:
        # the status has been sent, so report the error in the stream
        yield reply.failed(error_object(error))
