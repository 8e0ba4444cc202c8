"""Delivery: from what sequences emit to the answers of their requests, on the decoding thread."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.request import Chunk, FinishReason
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.errors import TrtEagle3Error, UserError, as_failure, is_failure

__all__ = ["CANCELLED", "Delivery", "engine_error", "outcome_of"]

_log = logging.getLogger("trt_eagle3")

CANCELLED = Chunk((), "", "cancelled")


class Delivery:
    """Who reads which sequence.

    Readers are woken all at once (``wake``): none takes the interpreter while others have yet to
    be told.
    """

    def __init__(self, scheduler: Scheduler, meter: Meter) -> None:
        self._scheduler = scheduler
        self._meter = meter
        # weak: an answer that nobody holds any more is cancelled
        self._answers: dict[int, tuple[weakref.ref[Answer], SequenceState]] = {}
        self._asleep: dict[Answer, None] = {}  # with news that their readers do not know of

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[tuple[Answer | None, SequenceState]]:
        """Everybody with a sequence; None where nobody holds the answer any more."""
        return ((held(), sequence) for held, sequence in list(self._answers.values()))

    def add(self, answer: Answer, sequence: SequenceState) -> None:
        """``answer`` gets what ``sequence`` emits."""
        self._answers[id(sequence)] = weakref.ref(answer), sequence

    def look_at_readers(self, *, draining: bool) -> None:
        """Drop those who left or whose sink failed, and see who lags; while ``draining`` nobody
        does.
        """
        for answer, sequence in self:
            if answer is None or answer.cancelled:
                self.drop(answer, sequence, "cancelled")
            elif answer.failure is not None:
                self.drop(answer, sequence, outcome_of(answer.failure), answer.failure)
            else:
                sequence.backpressured = answer.lagging and not draining
        self.wake()

    def deliver(self, emissions: Sequence[Emission]) -> None:
        """Hand on what a step emitted."""
        for emission in emissions:
            self._deliver(emission)
        self.wake()

    def fail(self, answer: Answer, error: BaseException) -> None:
        """Tell of the end of the thread that decodes."""
        answer.end(engine_error(error))
        self._asleep[answer] = None

    def wake(self) -> None:
        """Wake all readers that have news."""
        asleep, self._asleep = self._asleep, {}
        wake_readers(asleep)

    def drop(
        self,
        answer: Answer | None,
        sequence: SequenceState,
        outcome: str,
        error: Exception | None = None,
    ) -> None:
        """End a request, however that came; its pages are free before its reader hears of it."""
        self._answers.pop(id(sequence), None)
        self._meter.finished(outcome)  # whoever sees its pages free finds it counted
        self._scheduler.remove(sequence)
        if answer is None:
            return
        if outcome == "cancelled":
            answer.put(CANCELLED)
        answer.end(
            error if error is None or isinstance(error, TrtEagle3Error) else engine_error(error)
        )
        self._asleep[answer] = None

    def _deliver(self, emission: Emission) -> None:
        """Hand on what a step emitted for one sequence, up to the answer's end. What goes wrong
        ends this request alone.
        """
        sequence, error = emission.sequence, emission.error
        answer = self._answers[id(sequence)][0]()
        if answer is None:
            self.drop(None, sequence, "cancelled" if error is None else outcome_of(error))
            return
        reason = None
        try:
            reason = self._put_all(answer, emission)
        except BaseException as caught:  # reported to the reader
            if not is_failure(caught):
                raise
            _log.exception("an answer cannot be made of a request's tokens")
            error = as_failure(caught)
        if reason is not None:
            self.drop(answer, sequence, reason)
        elif error is not None:
            self.drop(answer, sequence, outcome_of(error), error)

    def _put_all(self, answer: Answer, emission: Emission) -> FinishReason | None:
        """Add what a step emitted to an answer, up to its end; why that is, None before it."""
        reasons = (self._put(answer, part) for part in emission.parts)
        return next((reason for reason in reasons if reason is not None), None)

    def _put(self, answer: Answer, emission: Emission) -> FinishReason | None:
        """Add what one forward emitted to an answer; why it is at its end, None before it."""
        assert answer.output is not None
        sequence, tokens = emission.sequence, emission.tokens
        start = len(answer.output.token_ids)
        logprobs = sequence.logprobs[start : start + len(tokens)]
        drafted = bool(emission.steps)
        chunk = answer.output.take(tokens, logprobs, full=emission.full, drafted=drafted)
        answer.reused_tokens = sequence.num_reused_rows
        seconds = answer.put(chunk)
        self._asleep[answer] = None
        if emission.steps is None:
            self._meter.first_token(sequence.queue_seconds or 0.0, answer.seconds)
        else:
            self._meter.cycle(len(tokens) - 1, emission.steps, len(chunk.token_ids), seconds)
        return chunk.finish_reason


def outcome_of(error: Exception) -> str:
    """How the metrics count a request that ended with ``error``: by whose fault it is."""
    return "rejected" if isinstance(error, UserError) else "error"


def engine_error(error: BaseException) -> Exception:
    """What readers hear of an error that is nobody's fault but ours."""
    failure = RuntimeError(f"decoding failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
