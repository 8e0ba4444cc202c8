"""Run a server's engine in another process."""

from __future__ import annotations

import itertools
import logging
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trt_eagle3.config import LimitsConfig
from trt_eagle3.decode.core import ENGINE_STOPPED
from trt_eagle3.decode.delivery import CANCELLED
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.metrics import EngineMetrics, stall_of
from trt_eagle3.decode.policy.protocol import FixedPolicy
from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.request import Chunk, Generation, PromptSource, Request
from trt_eagle3.decode.request.stopwatch import Stopwatch
from trt_eagle3.errors import ClosedError, EngineFailedError
from trt_eagle3.io.python_process import start_python
from trt_eagle3.multimodal import LOCAL_MEDIA, MediaPolicy, ModelInputs
from trt_eagle3.multimodal.caller import NO_CALLER, Caller
from trt_eagle3.serving.channel import (
    Cancel,
    Channel,
    Close,
    CountRejected,
    Failed,
    GetMetrics,
    Lag,
    Metrics,
    News,
    Opened,
    Ready,
    Submit,
)
from trt_eagle3.serving.engine_process import EngineJob

__all__ = ["RemoteEngine"]

_log = logging.getLogger("trt_eagle3")
_NO_POLICY = FixedPolicy(None)  # the engine process has a real one, which needs the GPU
_STATUS_S = 1.0  # from the end of a connection to the exit of its process
_CLOSE_S = 2.0  # for a process to exit after Close, which unblocks waiting readers
_METRICS_S = 10.0


class _RemoteAnswer(Answer):
    """An answer that the engine process generates."""

    lag_sent = False
    whole: Generation | None = None

    @property
    def generation(self) -> Generation:
        """What was generated; complete once the answer has ended."""
        return self.whole or super().generation


class RemoteEngine:
    """Start an engine's process, and act as its ``Engine`` for a server.

    Attributes:
        failed: the process has ended without a call of ``close``.
    """

    def __init__(self, job: EngineJob) -> None:
        """Start the process, which opens the engine in the background.

        Raises:
            EnvironmentMissingError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs.fileno())
        self._channel = Channel(Connection(ours.detach()))
        self._numbers = itertools.count()
        self._answers: dict[int, _RemoteAnswer] = {}
        self._lock = threading.Lock()
        self._gone = self._closed = False
        self.failed = False
        self._on_failure: Callable[[], object] = lambda: None
        self._news = threading.Condition()
        self._opened: LimitsConfig | None = None
        self._warm_up_seconds: float | None = None
        self._failure: Exception | None = None
        self._metrics: EngineMetrics | None = None
        self._num_metrics = 0
        self._owed = Stopwatch()  # time since unanswered metrics were requested
        self._bundle: LoadedBundle | None = None
        self._kill_later = threading.Timer(_CLOSE_S, self._process.kill)
        self._kill_later.daemon = True
        self._channel.send(job)
        self._reader = threading.Thread(target=self._read, name="trt-eagle3-news", daemon=True)
        self._reader.start()

    def wait_until_open(self) -> LimitsConfig:
        """Wait until the bundle is open; return its limits, reduced to the memory of the process.

        Raises:
            UserError: an error in the bundle. EngineFailedError: the process ended.
        """
        self._wait(lambda: self._opened is not None)
        assert self._opened is not None
        return self._opened

    def wait_until_ready(self) -> float:
        """Wait until the engine is ready; return the seconds of the warm-up.

        Raises:
            UserError, EngineFailedError: as for ``wait_until_open``.
        """
        self._wait(lambda: self._warm_up_seconds is not None)
        assert self._warm_up_seconds is not None
        return self._warm_up_seconds

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._news:
            self._news.wait_for(lambda: holds() or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def on_failure(self, call: Callable[[], object]) -> None:
        """Call ``call`` once the engine has ``failed``; on any thread, and perhaps twice."""
        self._on_failure = call
        if self.failed:
            call()

    def attach(
        self,
        bundle: Path,
        *,
        media: MediaPolicy = LOCAL_MEDIA,
        split_special_tokens: bool | None = None,
        tool_format: str = "auto",
        tensor_parallel: int | None = None,
    ) -> None:
        """Read this process's parts of ``bundle``, once the engine process has opened it.

        Raises:
            UserError, EngineFailedError: as for ``wait_until_open``.
        """
        self._bundle = LoadedBundle.open(
            bundle,
            media=media,
            split_special_tokens=split_special_tokens,
            tool_format=tool_format,
            policy=_NO_POLICY,
            limits=self.wait_until_open(),
            tensor_parallel=tensor_parallel,
        )

    @property
    def bundle(self) -> LoadedBundle:
        """The bundle read by ``attach``; this process runs none of its graphs and uses no GPU."""
        assert self._bundle is not None, "attach a bundle first"
        return self._bundle

    @property
    def ready(self) -> bool:
        """Whether the engine accepts requests."""
        return not self._gone and not self._closed

    def submit(self, request: Request) -> Answer:
        """Start answering; the answer raises errors of the request.

        Raises:
            ClosedError: this is closed, or the process has ended.
        """
        number = next(self._numbers)
        answer = _RemoteAnswer(lambda: self._look_at(number))
        with self._lock:
            if not self.ready:
                raise ClosedError(ENGINE_STOPPED)
            self._answers[number] = answer
        self._channel.send(Submit(number, request))
        return answer

    def prepare(self, prompt: PromptSource, *, caller: Caller = NO_CALLER) -> ModelInputs:
        """Return tokens, positions and patches of a prompt, made in this process.

        Raises:
            UserError: an error in the prompt. RequestCancelledError: ``caller`` disconnected.
        """
        request = Request(prompt, client=caller.client)
        return self.bundle.preprocessor().model_inputs(request, caller)

    def metrics(self) -> EngineMetrics:
        """Return the counters so far; the last known ones if the process has ended or is slow."""
        with self._news:
            asked = self._num_metrics
            self._ask_for_metrics()
            self._news.wait_for(lambda: self._num_metrics > asked or not self.ready, _METRICS_S)
            assert self._metrics is not None, "Metrics must precede Ready"
            return self._metrics

    def _ask_for_metrics(self) -> None:
        """Request metrics; the caller holds ``_news``."""
        if not self._owed.runs:
            self._owed.start()
        self._channel.send(GetMetrics())

    def stall(self, max_step_s: float) -> str | None:
        """Describe why the process seems to hang, as of its last metrics, or return None.

        Requests the next metrics, which the next call uses; ``metrics`` requests them too.
        """
        with self._news:
            if not self._owed.runs:
                self._ask_for_metrics()
            silent_s = self._owed.seconds
            assert self._metrics is not None, "Metrics must precede Ready"
            metrics = self._metrics
        if silent_s > max_step_s:
            return f"the engine's process has not answered for {silent_s:.0f} s"
        return stall_of(metrics.step_seconds, metrics.prepare_seconds, max_step_s)

    def count_rejected(self) -> None:
        """Count a request that this process refused."""
        self._channel.send(CountRejected())

    def close(self) -> None:
        """Cancel requests in flight, accept no more, and end the process within a time limit.

        Returns at once.
        """
        if not self._closed:
            self._closed = True
            self._channel.send(Close())
            self._kill_later.start()
            with self._news:  # wakes callers that wait for metrics
                self._news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the engine, and wait for the process to exit.

        After Ctrl-C, or while the engine is still opening, the process is killed.
        """
        self.close()
        if kind is KeyboardInterrupt or self._warm_up_seconds is None:
            self._process.kill()
        self._process.wait()
        self._kill_later.cancel()
        self._reader.join()
        self._channel.close()
        if self._bundle is not None and self._bundle.processor.decoders is not None:
            self._bundle.processor.decoders.close()

    def _look_at(self, number: int) -> None:
        """Forward to the process that an answer was cancelled, or that its reader has caught up."""
        answer = self._answers.get(number)
        if answer is None:
            return
        if answer.cancelled:
            self._channel.send(Cancel(number))
        elif answer.lag_sent and not answer.lagging:
            answer.lag_sent = False
            self._channel.send(Lag(number, False))

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._hear(message)
        finally:
            self._end_answers()

    def _end_answers(self) -> None:
        """End all answers, and wake all waiting callers: the process is gone."""
        with self._lock:
            self._gone = True
            left = list(self._answers.values())
            self._answers.clear()
        for answer in left:
            if self._closed:
                answer.put(CANCELLED)
                answer.end()
            else:
                answer.end(ClosedError("the engine's process ended. Try again later."))
        wake_readers(left)
        failure = EngineFailedError(f"engine: {_end_of(self._process)}")
        self.failed = not self._closed
        if self.failed and self._warm_up_seconds is not None:  # else the waiting caller raises it
            _log.error("%s", failure)
        with self._news:
            self._failure = self._failure or failure
            self._news.notify_all()
        if self.failed:
            self._on_failure()

    def _hear(self, message: Any) -> None:
        if isinstance(message, News):
            self._deliver(message)
            return
        with self._news:
            match message:
                case Opened(limits):
                    self._opened = limits
                case Ready(seconds):
                    self._warm_up_seconds = seconds
                case Failed(error):
                    self._failure = error
                case Metrics(metrics):
                    self._metrics = metrics
                    self._num_metrics += 1
                    self._owed.stop()
            self._news.notify_all()

    def _deliver(self, news: News) -> None:
        """Put chunks into their answers, and wake all readers once."""
        changed: dict[Answer, None] = {}
        for number, fields in news.chunks:
            if (answer := self._answers.get(number)) is not None:
                answer.put(Chunk(*fields))
                changed[answer] = None
                if not answer.lag_sent and answer.lagging:
                    self._channel.send(Lag(number, True))
                    answer.lag_sent = True
                    self._look_at(number)  # the reader's thread may have caught up meanwhile
        for number, error, generation in news.ends:
            if (answer := self._answers.pop(number, None)) is not None:
                answer.whole = generation
                answer.end(error)
                changed[answer] = None
        wake_readers(changed)


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    return start_python("trt_eagle3.serving.engine_process", descriptor, "engine")


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Describe how a process ended after it closed its connection; kill it if it still runs."""
    try:
        status = process.wait(_STATUS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "its process closed its connection, and was killed."
    if status >= 0:
        return f"its process ended with status {status}. See the log."
    name = next((s.name for s in signal.Signals if s == -status), f"signal {-status}")
    memory = " Is there enough memory?" if -status == signal.SIGKILL else ""
    return f"its process was ended by {name}.{memory}"
