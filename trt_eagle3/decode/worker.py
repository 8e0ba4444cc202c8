"""The worker: one thread that steps the scheduler and delivers emitted tokens to the answers."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trt_eagle3.decode.answer import Answer
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.output import Output
from trt_eagle3.decode.request import Chunk, Request
from trt_eagle3.decode.scheduler import Emission, Scheduler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.errors import OverloadedError, RequestCancelledError, TrtEagle3Error, UserError
from trt_eagle3.multimodal.caller import Caller

__all__ = ["Worker"]

_log = logging.getLogger("trt_eagle3")
_TOKENISING = 2  # threads that prepare texts while the worker decodes
_POLL_SECONDS = 0.02  # how soon a reader that lagged behind is looked at again

CANCELLED = Chunk((), "", "cancelled")

Prepare = Callable[[Request, Caller], tuple[SequenceState, Output]]


class Worker:
    """Owns the scheduler: nobody else touches it."""

    def __init__(self, scheduler: Scheduler, meter: Meter, *, max_waiting: int) -> None:
        self._scheduler = scheduler
        self._meter = meter
        self._max_waiting = max_waiting
        self._news = threading.Condition()
        self._inbox: list[tuple[Answer, SequenceState]] = []
        # its reader lets go: it is cancelled
        self._answers: dict[int, tuple[weakref.ref[Answer], SequenceState]] = {}
        self._num_preparing = 0
        self._num_stalled = 0  # in the scheduler's queue, but not to be run
        self._closing = self._draining = False
        # A text takes milliseconds, the images of one request can take many seconds: nobody else
        # waits behind them. A
        # thread for each, because they wait: for a host, or for their turn at the processes that
        # decode.
        threads = {False: _TOKENISING, True: max_waiting}
        self._pools = {
            media: ThreadPoolExecutor(count, "trt-eagle3-prepare")
            for media, count in threads.items()
        }
        self._thread = threading.Thread(target=self._run, name="trt-eagle3-decode", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests will be answered."""
        return self._thread.is_alive() and not self._closing and not self._draining

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place; those that were preempted because nobody reads their
        answers do not.
        """
        with self._news:
            waiting = max(len(self._scheduler.waiting) - self._num_stalled, 0)
            return self._num_preparing + len(self._inbox) + waiting

    def submit(self, request: Request, prepare: Prepare) -> Answer:
        """Take a request; ``prepare`` runs on another thread.

        Raises:
            OverloadedError: too many wait already, or the engine is closed.
        """
        with self._news:
            answer = self._accept(prepare)
            self._pools[request.has_media].submit(self._prepare, answer, request, prepare)
        return answer

    def submit_together(self, requests: Sequence[Request], prepare: Prepare) -> list[Answer]:
        """Take requests that the next pass finds all of them; ``prepare`` runs here, and decoding
        waits for it.

        Raises:
            OverloadedError: as for ``submit``; those before it are taken.
        """
        answers = []
        with self._news:
            for request in requests:
                answers.append(self._accept(prepare))
                self._prepare(answers[-1], request, prepare)
        return answers

    def close(self, *, drain: bool = False) -> None:
        """Stop; requests in flight are cancelled, or with ``drain`` answered first."""
        with self._news:
            self._draining |= drain
            self._closing |= not drain
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for pool in self._pools.values():
            pool.shutdown(wait=False)

    def _accept(self, prepare: Prepare) -> Answer:
        if not self.alive:
            raise OverloadedError("the engine is closed. Load it again.")
        if self.num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests wait already (limits.max_waiting). Try again later."
            )
        if self._num_stalled >= self._max_waiting:
            raise OverloadedError(
                f"{self._num_stalled} answers are not read (limits.max_waiting). Read them first."
            )
        self._num_preparing += 1
        return Answer(self._wake, keeps=prepare)

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def _prepare(self, answer: Answer, request: Request, prepare: Prepare) -> None:
        ready, error = None, None
        try:
            if not (answer.cancelled or self._closing):
                caller = Caller(request.client, lambda: answer.cancelled or self._closing)
                ready = prepare(request, caller)
        except RequestCancelledError:
            pass
        except Exception as caught:  # every error is the reader's to see
            error = caught
        if ready is not None:
            answer.prompt_tokens = len(ready[0].prompt.token_ids)
            self._meter.begun(answer.prompt_tokens)
        with self._news:
            self._num_preparing -= 1
            if self._closing:
                ready = None
            if ready is not None:
                sequence, answer.output = ready
                self._inbox.append((answer, sequence))
            self._news.notify_all()
        if ready is None:
            self._meter.finished("cancelled" if error is None else _outcome(error))
            if error is None:
                answer.put(CANCELLED)
            answer.end(error)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.exception("the decoding thread died")
            with self._news:
                self._closing = True
            for answer, _ in self._readers():
                if answer is not None:
                    answer.end(_engine_error(error))
            raise

    @torch.inference_mode()
    def _serve(self) -> None:
        while self._wait():
            # a call of its own: while this thread waits, it holds on to nobody's request
            self._turn()
        for answer, sequence in self._readers():
            self._drop(answer, sequence, "cancelled")

    def _readers(self) -> list[tuple[Answer | None, SequenceState]]:
        """Everybody with a sequence; None where nobody holds the answer any more."""
        return [*((held(), sequence) for held, sequence in self._answers.values()), *self._inbox]

    def _turn(self) -> None:
        """Take what has come, and step."""
        with self._news:
            for answer, sequence in self._inbox:
                self._answers[id(sequence)] = weakref.ref(answer), sequence
                self._scheduler.add(sequence)
            self._inbox.clear()
        self._look_at_readers()
        try:
            emissions = self._scheduler.step()
        except Exception as error:  # a pass failed: nothing of what it was for can be trusted
            _log.exception("a step failed")
            emissions = [
                Emission(sequence, (), error=error) for sequence in self._scheduler.reset()
            ]
        depths = [emission.steps for emission in emissions if emission.steps is not None]
        if depths:
            self._meter.drafted(any(depths))
        for emission in emissions:
            self._deliver(emission)
        self._num_stalled = sum(sequence.backpressured for sequence in self._scheduler.waiting)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when it is time to stop."""
        with self._news:
            while not self._closing and not self._inbox and self._scheduler.idle:
                if self._draining and not self._answers and not self._num_preparing:
                    return False
                unread = bool(self._answers)
                self._news.wait(_POLL_SECONDS if unread else None)
                if unread:
                    break
            return not self._closing

    def _look_at_readers(self) -> None:
        for held, sequence in list(self._answers.values()):
            answer = held()
            if answer is None or answer.cancelled:
                self._drop(answer, sequence, "cancelled")
            else:
                sequence.backpressured = answer.lagging and not self._draining

    def _deliver(self, emission: Emission) -> None:
        sequence = emission.sequence
        answer = self._answers[id(sequence)][0]()
        if emission.error is not None:
            self._drop(answer, sequence, _outcome(emission.error), emission.error)
            return
        if answer is None:
            self._drop(None, sequence, "cancelled")
            return
        assert answer.output is not None
        chunk = answer.output.take(emission.tokens, full=emission.full)
        seconds = answer.put(chunk)
        if emission.steps is None:
            self._meter.first_token(sequence.queue_seconds or 0.0, answer.seconds)
        else:
            self._meter.cycle(
                len(emission.tokens) - 1, emission.steps, len(chunk.token_ids), seconds
            )
        if chunk.finish_reason:
            self._drop(answer, sequence, chunk.finish_reason)

    def _drop(
        self,
        answer: Answer | None,
        sequence: SequenceState,
        outcome: str,
        error: Exception | None = None,
    ) -> None:
        """The end of a request, however it came; its pages are free before its reader hears of
        it.
        """
        self._answers.pop(id(sequence), None)
        self._scheduler.remove(sequence)
        self._meter.finished(outcome)
        if answer is None:
            return
        if outcome == "cancelled":
            answer.put(CANCELLED)
        answer.end(
            error if error is None or isinstance(error, TrtEagle3Error) else _engine_error(error)
        )


def _outcome(error: Exception) -> str:
    """How the metrics count a request that ended with ``error``: by whose fault it is."""
    return "rejected" if isinstance(error, UserError) else "error"


def _engine_error(error: BaseException) -> Exception:
    failure = RuntimeError(f"decoding failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
