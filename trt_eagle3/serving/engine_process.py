"""Run an engine in its own process, so that decoding and HTTP do not share an interpreter.

``remote_engine`` starts the process and communicates with it over a ``channel``. The process exits
when the other end closes.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trt_eagle3.decode.forward.chunks import MAX_STEP_MS
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.errors import EngineFailedError, TrtEagle3Error, as_failure, clip
from trt_eagle3.multimodal import MediaPolicy
from trt_eagle3.multimodal.media_cache import MEDIA_CACHE, MediaCacheSizes
from trt_eagle3.serving.channel import (
    Cancel,
    Channel,
    Close,
    CountRejected,
    Failed,
    Fields,
    GetMetrics,
    Lag,
    Metrics,
    News,
    Opened,
    Ready,
    Submit,
)
from trt_eagle3.serving.log import set_up_log
from trt_eagle3.serving.warm_up import warm_up

__all__ = ["EngineHost", "EngineJob", "OpenEngine", "main"]

_log = logging.getLogger("trt_eagle3")
_END_S = 5.0  # before the process exits without the engine: a forward may hang, or a reader stall

OpenEngine = Callable[[], LLM]


@dataclass(frozen=True)
class EngineJob:
    """The task of the process. ``open_engine`` must be importable: the process calls it."""

    open_engine: OpenEngine
    log_level: str = "info"

    @classmethod
    def of_bundle(
        cls,
        bundle: Path,
        media: MediaPolicy,
        *,
        media_cache: MediaCacheSizes = MEDIA_CACHE,
        split_special_tokens: bool | None,
        tool_format: str = "auto",
        tensor_parallel: int | None = None,
        max_step_ms: float = MAX_STEP_MS,
        log_level: str,
    ) -> EngineJob:
        """Make the job that opens ``bundle``; arguments as for ``LLM``."""
        opened = partial(
            LLM,
            bundle,
            media=media,
            media_cache=media_cache,
            split_special_tokens=split_special_tokens,
            tool_format=tool_format,
            tensor_parallel=tensor_parallel,
            max_step_ms=max_step_ms,
        )
        return cls(opened, log_level)


def main(descriptor: int) -> None:
    """Serve the connection until ``Close`` or its end, then exit with status 0 or 1.

    Args:
        descriptor: of the connection; its first message is an ``EngineJob``.
    """
    # A service manager may signal every process of a service. The server alone handles these
    # signals, so that answers can finish.
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, lambda *_: None)
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)  # traces of crashes in native code
    os.set_inheritable(descriptor, False)  # an inherited copy would hide the end from the server
    closed = EngineHost(Connection(descriptor)).run()
    logging.shutdown()
    os._exit(0 if closed else 1)  # no cleanup is left, and Python's exit would take a second


class EngineHost:
    """An engine, its answers by number, and the channel to their readers."""

    def __init__(self, connection: Connection) -> None:
        self._channel = Channel(connection, self._messages_of)
        self._engine: LLM | None = None
        self._ending = False
        self._answers: dict[int, Answer] = {}
        self._numbers: dict[Answer, int] = {}

    def _open(self, job: EngineJob) -> None:
        """Open and warm up the engine; send ``Ready`` or ``Failed``."""
        set_up_log(job.log_level)
        try:
            engine = job.open_engine()
            engine.on_death(self._channel.end)  # a rank may fail while no request is in flight
            self._channel.send(Opened(engine.bundle.limits))
            seconds = warm_up(engine)
        except BaseException as error:
            self._channel.send(Failed(_why_not_opened(error)))
            return
        self._engine = engine
        self._channel.send(Metrics(engine.metrics()))
        self._channel.send(Ready(seconds))

    def run(self) -> bool:
        """Handle messages until ``Close``, or until none can follow; return whether ``Close`` came.

        Once the connection has ended, no reader is left for requests in flight.
        """
        going = True
        while going:
            going = self._take(self._channel.receive())  # holds no request while it waits
        return self._ending

    def _take(self, message: Any) -> bool:
        """Handle a message; return whether more may follow."""
        if isinstance(message, Close):
            self._end()
        elif message is not None:
            self._do(message)
            return True
        return False

    def _end(self) -> None:
        """Cancel requests in flight, and send their ends."""
        self._ending = True
        if self._engine is None:  # still opening, which may take minutes
            return
        late = threading.Timer(_END_S, os._exit, (1,))
        late.daemon = True
        late.start()
        self._engine.close()
        self._channel.close()
        late.cancel()

    def _do(self, message: Any) -> None:
        if isinstance(message, EngineJob):
            threading.Thread(target=self._open, args=(message,), daemon=True).start()
            return
        engine = self._engine
        assert engine is not None, "the server sends requests only after Ready"
        match message:
            case Submit():
                self._submit(engine, message)
            case Cancel(number):
                if (answer := self._answers.get(number)) is not None:
                    answer.cancel()
            case Lag(number, lags):
                if (answer := self._answers.get(number)) is not None:
                    answer.set_lag(lags)
            case CountRejected():
                engine.count_rejected()
            case GetMetrics():
                self._channel.send(Metrics(engine.metrics()))

    def _submit(self, engine: LLM, message: Submit) -> None:
        try:
            answer = engine.submit(message.request)
        except BaseException as error:  # sent to the reader
            answer = Answer(lambda: None)
            answer.end(as_failure(error))
        self._answers[message.number] = answer
        self._numbers[answer] = message.number
        answer.send_to(self._channel.send)

    def _messages_of(self, items: list[Any]) -> list[Any]:
        """Take chunks when they are sent, on the channel's thread, so that decoding continues."""
        posted: dict[Answer, None] = {}
        others = []
        for item in items:
            if isinstance(item, list):
                posted.update(dict.fromkeys(item))
            else:
                others.append(item)
        if posted and not self._ending and self._engine is not None and not self._engine.ready:
            self._channel.end()  # the engine thread has died: these are the last chunks
        return [self._news(list(posted)), *others] if posted else others

    def _news(self, answers: Sequence[Answer]) -> News:
        chunks, ends = [], []
        for answer in answers:
            number = self._numbers.get(answer)
            if number is None:  # it had ended already
                continue
            found, over = answer.take()
            chunks += [(number, _fields(chunk)) for chunk in found]
            if over:
                error = None if answer.error is None else _portable(answer.error)
                ends.append((number, error, answer.generation))
                del self._numbers[answer], self._answers[number]
        return News(chunks, ends)


def _fields(chunk: Chunk) -> Fields:
    counts = chunk.accepted_lengths
    return chunk.token_ids, chunk.text, chunk.finish_reason, chunk.logprobs, counts


def _why_not_opened(error: BaseException) -> TrtEagle3Error:
    """Return the server's error for an engine that cannot be opened; log an unexpected one."""
    if isinstance(error, TrtEagle3Error):
        return _portable(error)
    if isinstance(error, MemoryError):
        return EngineFailedError(
            "engine: no memory is left to open it. Free some, or build with smaller limits."
        )
    _log.error("the engine cannot be opened", exc_info=error)
    return EngineFailedError(f"engine: cannot be opened: {type(error).__name__}: {clip(error)}")


def _portable(error: Exception) -> TrtEagle3Error:
    """Convert ``error`` to one of our classes, message only, so that any process can load it."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == TrtEagle3Error.__module__]
    if kinds:
        found: TrtEagle3Error = kinds[0](str(error))
        return found
    _log.error("a request failed", exc_info=error)  # the traceback stays in this process
    name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return EngineFailedError(f"{name}{error}")
