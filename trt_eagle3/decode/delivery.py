"""Delivery: append emitted tokens to the answers of their requests, on the decoding thread."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.metrics import Meter
from trt_eagle3.decode.request.answer import Answer, wake_readers
from trt_eagle3.decode.request.request import Chunk, FinishReason
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.errors import RankFailedError, TrtEagle3Error, UserError, as_failure, is_failure

__all__ = ["CANCELLED", "Delivery", "Ended", "engine_error", "outcome_of"]

_log = logging.getLogger("trt_eagle3")

CANCELLED = Chunk((), "", "cancelled")


@dataclass(frozen=True, eq=False)
class Ended:
    """A request that has ended. ``Delivery.close`` wakes its reader.

    Attributes:
        answer: None if it is no longer referenced.
        sequence: its memory must be released before the reader is woken.
        outcome: its label in the metrics. error: the error for the reader; None: no error.
    """

    answer: Answer | None
    sequence: SequenceState
    outcome: str
    error: Exception | None = None


class Delivery:
    """The answers of all sequences.

    All readers are woken together (``close``), so that none takes the interpreter before the others
    are woken.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        # weak: an answer without references is cancelled
        self._answers: dict[int, tuple[weakref.ref[Answer], SequenceState]] = {}
        self._asleep: dict[Answer, None] = {}  # changed, but their readers are not woken yet

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[tuple[Answer | None, SequenceState]]:
        """Yield every sequence with its answer; None if the answer is no longer referenced."""
        return ((held(), sequence) for held, sequence in list(self._answers.values()))

    def add(self, answer: Answer, sequence: SequenceState) -> None:
        """Deliver tokens of ``sequence`` to ``answer`` from now on."""
        self._answers[id(sequence)] = weakref.ref(answer), sequence

    def poll_clients(self, *, draining: bool) -> list[Ended]:
        """Update the backpressure of all sequences; while ``draining`` there is none.

        Returns the requests whose readers left or whose sinks failed.
        """
        found = []
        for answer, sequence in self:
            if answer is None or answer.cancelled:
                found.append(self.end(answer, sequence, "cancelled"))
            elif answer.failure is not None:
                failure = answer.failure
                found.append(self.end(answer, sequence, outcome_of(failure), failure))
            else:
                sequence.backpressured = answer.lagging and not draining
        return found

    def deliver(self, emissions: Sequence[Emission]) -> list[Ended]:
        """Append a step's tokens to the answers; returns the requests that ended."""
        found = (self._deliver(emission) for emission in emissions)
        return [ended for ended in found if ended is not None]

    def fail(self, answer: Answer, error: BaseException) -> None:
        """End an answer because the decoding thread died."""
        answer.end(error if isinstance(error, RankFailedError) else engine_error(error))
        self._asleep[answer] = None

    def end(
        self,
        answer: Answer | None,
        sequence: SequenceState,
        outcome: str,
        error: Exception | None = None,
    ) -> Ended:
        """Remove and count a request that has ended."""
        self._answers.pop(id(sequence), None)
        self._meter.finished(outcome)  # before its pages are free
        return Ended(answer, sequence, outcome, error)

    def close(self, ended: Iterable[Ended] = ()) -> None:
        """End the answers of ``ended``, and wake the readers of all changed answers.

        The sequences of ``ended`` must be released before.
        """
        for one in ended:
            answer, error = one.answer, one.error
            if answer is None:
                continue
            if one.outcome == "cancelled":
                answer.put(CANCELLED)
            if error is not None and not isinstance(error, TrtEagle3Error):
                error = engine_error(error)
            answer.end(error)
            self._asleep[answer] = None
        asleep, self._asleep = self._asleep, {}
        wake_readers(asleep)

    def _deliver(self, emission: Emission) -> Ended | None:
        """Append one sequence's tokens to its answer; returns its end, None before the end.

        A failure ends only this request.
        """
        sequence, error = emission.sequence, emission.error
        answer = self._answers[id(sequence)][0]()
        if answer is None:
            return self.end(None, sequence, "cancelled" if error is None else outcome_of(error))
        reason = None
        try:
            reason = self._put_all(answer, emission)
        except BaseException as caught:  # reported to the reader
            if not is_failure(caught):
                raise
            _log.exception("cannot make an answer of a request's tokens")
            error = as_failure(caught)
        if reason is not None:
            return self.end(answer, sequence, reason)
        if error is not None:
            return self.end(answer, sequence, outcome_of(error), error)
        return None

    def _put_all(self, answer: Answer, emission: Emission) -> FinishReason | None:
        """Add a step's tokens to an answer; returns its finish reason, None before the end."""
        reasons = (self._put(answer, part) for part in emission.parts)
        return next((reason for reason in reasons if reason is not None), None)

    def _put(self, answer: Answer, emission: Emission) -> FinishReason | None:
        """Add one forward's tokens to an answer; returns its finish reason, None before the end."""
        assert answer.output is not None
        sequence, tokens = emission.sequence, emission.tokens
        start = len(answer.output.token_ids)
        logprobs = sequence.logprobs[start : start + len(tokens)]
        drafted = bool(emission.tree_depth)
        chunk = answer.output.take(tokens, logprobs, full=emission.full, drafted=drafted)
        answer.reused_tokens = sequence.num_reused_rows
        answer.prompt_logprobs = sequence.prompt_logprobs
        seconds = answer.put(chunk)
        self._asleep[answer] = None
        if emission.tree_depth is None:
            self._meter.first_token(sequence.queue_seconds or 0.0, answer.seconds)
        else:
            self._meter.cycle(len(tokens) - 1, emission.tree_depth, len(chunk.token_ids), seconds)
        return chunk.finish_reason


def outcome_of(error: Exception) -> str:
    """Return the metrics label of a request that failed: ``rejected`` for user errors."""
    return "rejected" if isinstance(error, UserError) else "error"


def engine_error(error: BaseException) -> Exception:
    """Wrap an internal error for the reader of an answer."""
    failure = RuntimeError(f"decoding failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
