"""The process of an engine, beside that of its server: one decodes, the other speaks HTTP, and
neither waits for the other's interpreter.

``remote_engine`` starts it, and talks to it over a ``channel``. It ends with the other end.
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

from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Chunk
from trt_eagle3.errors import EngineFailedError, TrtEagle3Error, as_failure, clip
from trt_eagle3.multimodal import MediaPolicy
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
_END_S = 5.0  # that the process has to end: a forward may hang, and a reader stand still

OpenEngine = Callable[[], LLM]


@dataclass(frozen=True)
class EngineJob:
    """What the process is for. ``open_engine``: importable, as the process calls it."""

    open_engine: OpenEngine
    log_level: str = "info"

    @classmethod
    def of_bundle(
        cls,
        bundle: Path,
        media: MediaPolicy,
        *,
        split_special_tokens: bool | None,
        tool_format: str = "auto",
        log_level: str,
    ) -> EngineJob:
        """The engine of a bundle, as ``LLM`` takes it."""
        opened = partial(
            LLM,
            bundle,
            media=media,
            split_special_tokens=split_special_tokens,
            tool_format=tool_format,
        )
        return cls(opened, log_level)


def main(descriptor: int) -> None:
    """Serve the other end of a connection until that tells to end, or is closed, and end the
    process: with status 0 or 1.

    ``descriptor``: of the connection, on which an ``EngineJob`` comes first.
    """
    # A service manager may send them to every process of a service. They are the server's, which
    # lets answers end.
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, lambda *_: None)
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)  # native code that crashes: from where
    os.set_inheritable(descriptor, False)  # who holds it keeps the server from hearing of the end
    told = EngineHost(Connection(descriptor)).run()
    logging.shutdown()
    os._exit(0 if told else 1)  # nothing is left to tidy up, and Python would take a second for it


class EngineHost:
    """An engine, its answers by number, and the channel to their readers."""

    def __init__(self, connection: Connection) -> None:
        self._channel = Channel(connection, self._messages_of)
        self._engine: LLM | None = None
        self._ending = False
        self._answers: dict[int, Answer] = {}
        self._numbers: dict[Answer, int] = {}

    def _open(self, job: EngineJob) -> None:
        """Open and warm the engine up, and say so, or what is wrong."""
        set_up_log(job.log_level)
        try:
            engine = job.open_engine()
            self._channel.send(Opened(engine.bundle.limits))
            seconds = warm_up(engine)
        except BaseException as error:
            self._channel.send(Failed(_why_not_opened(error)))
            return
        self._engine = engine
        self._channel.send(Metrics(engine.metrics()))
        self._channel.send(Ready(seconds))

    def run(self) -> bool:
        """Do what messages say until one tells to end, or no other can come: then nobody is left
        who would hear of what is in flight. Returns whether one told to.
        """
        going = True
        while going:
            going = self._take(self._channel.receive())  # and hold no request while it waits
        return self._ending

    def _take(self, message: Any) -> bool:
        """Do what a message says; returns whether others may follow."""
        if isinstance(message, Close):
            self._end()
        elif message is not None:
            self._do(message)
            return True
        return False

    def _end(self) -> None:
        """Cancel what is in flight, and tell whose it is."""
        self._ending = True
        if self._engine is None:  # it is still being opened, which may take minutes
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
        assert engine is not None, "the other end asks once the engine is ready"
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
        except BaseException as error:  # reported to the reader
            answer = Answer(lambda: None)
            answer.end(as_failure(error))
        self._answers[message.number] = answer
        self._numbers[answer] = message.number
        answer.send_to(self._channel.send)

    def _messages_of(self, items: list[Any]) -> list[Any]:
        """Chunks are taken when they are sent, on the channel's thread: decoding goes on."""
        posted: dict[Answer, None] = {}
        others = []
        for item in items:
            if isinstance(item, list):
                posted.update(dict.fromkeys(item))
            else:
                others.append(item)
        if posted and not self._ending and self._engine is not None and not self._engine.ready:
            self._channel.end()  # the thread that decodes has died: this was the last of it
        return [self._news(list(posted)), *others] if posted else others

    def _news(self, answers: Sequence[Answer]) -> News:
        chunks, ends = [], []
        for answer in answers:
            number = self._numbers.get(answer)
            if number is None:  # it was over the last time
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
    """What the server says of an engine that cannot be opened; the log has what is our fault."""
    if isinstance(error, TrtEagle3Error):
        return _portable(error)
    if isinstance(error, MemoryError):
        return EngineFailedError(
            "engine: no memory is left to open it. Free some, or build with smaller limits."
        )
    _log.error("the engine cannot be opened", exc_info=error)
    return EngineFailedError(f"engine: cannot be opened: {type(error).__name__}: {clip(error)}")


def _portable(error: Exception) -> TrtEagle3Error:
    """``error`` as any process can read it: of one of our kinds, and its message alone."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__ == TrtEagle3Error.__module__]
    if kinds:
        found: TrtEagle3Error = kinds[0](str(error))
        return found
    _log.error("a request failed", exc_info=error)  # its traceback does not leave this process
    name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
    return EngineFailedError(f"{name}{error}")
