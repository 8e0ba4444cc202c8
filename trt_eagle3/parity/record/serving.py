"""Served answers: every prompt again, through the engine as ``serve`` runs it.

The other answers are recorded forward by forward, so the host waits for each. Here nothing is
recorded: steps are launched ahead of the host, prompts run beside the steps of others, and captured
graphs run, as far as backend and device can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trt_eagle3.decode.request.request import Generation, Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine

__all__ = ["ROUNDS", "ServedAnswers", "answer_served"]

ROUNDS = 2
"""With speculation and without."""
_MOST_CLIENTS = 32  # as many prompts as a suite has


@dataclass(frozen=True)
class ServedAnswers:
    """Answers of concurrent clients.

    Attributes:
        replies: by round, in the order of the cases.
        runs_ahead: whether steps may be launched ahead of the host here.
        num_ahead: steps that were. num_mixed: forwards over prompts and steps.
        num_clients: requests that are in flight at once.
    """

    replies: Sequence[Sequence[Generation]]
    runs_ahead: bool
    num_ahead: int
    num_mixed: int
    num_clients: int


def answer_served(
    engine: RecordingEngine,
    answers: Sequence[RecordedAnswer],
    max_tokens: int,
    progress: Callable[[], object],
) -> ServedAnswers:
    """Answer all cases again, with speculation and without.

    A client sends its next request when it has an answer. So half of the prompts at least arrive
    while other requests decode.
    """
    engine.serve()
    decoder, before = engine.bundle.decoder, engine.bundle.decoder.stepper.num_ahead
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    questions = [answer.case.question for answer in answers]
    requests = [
        Request(q.prompt, q.images, q.videos, sampling, speculation)
        for speculation in (True, False)
        for q in questions
    ]
    limits = engine.limits
    most = min(limits.max_batch_size, limits.max_waiting, _MOST_CLIENTS)
    num_clients = min(max(len(answers), ROUNDS), most)
    with ThreadPoolExecutor(num_clients) as clients:
        found = list(clients.map(lambda request: engine.submit(request).finish(), requests))
    progress()
    return ServedAnswers(
        (found[: len(answers)], found[len(answers) :]),
        decoder.runs_ahead,
        decoder.stepper.num_ahead - before,
        engine.recording.num_mixed,
        num_clients,
    )
