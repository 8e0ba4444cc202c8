"""Batched answers: every prompt at once, as in service.

Alone, a prompt runs in the first row of a batch, over fresh pages that never run out. Here all
prompts run in one batch, twice. The second round has fewer pages than it needs: prefixes are
reused, and sequences are preempted and recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from trt_eagle3.decode.request.answer import Answer
from trt_eagle3.decode.request.request import Generation, Request
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.record.answers import RecordedAnswer, kept_columns
from trt_eagle3.parity.record.engine import RecordedForward, RecordingEngine

__all__ = ["ROUNDS", "BatchedAnswers", "answer_batched"]

ROUNDS = 2
"""The second round finds the pages of the first, and has too few."""


@dataclass(frozen=True)
class BatchedAnswers:
    """Answers to all prompts, submitted at once.

    Attributes:
        replies: by round, in the order of the cases.
        forwards: by round, of the target.
        columns: kept columns of its logits; None: all.
        preempted: number of preempted sequences.
        reused: prompt rows found in the prefix cache.
    """

    replies: Sequence[Sequence[Generation]]
    forwards: Sequence[Sequence[RecordedForward]]
    columns: Tensor | None
    preempted: int
    reused: int


def answer_batched(
    engine: RecordingEngine,
    answers: Sequence[RecordedAnswer],
    max_tokens: int,
    progress: Callable[[], object],
) -> BatchedAnswers:
    """Answer all cases again at once, and once more with few pages."""
    engine.take()
    engine.begin_service()
    engine.recording.only = "target"
    columns = engine.recording.columns = kept_columns(engine, engine.limits.max_batch_size)
    replies, forwards = [_ask(engine, answers, max_tokens)], [engine.take()]
    progress()
    engine.leave_pages(_num_pages(engine, answers))
    replies.append(_ask(engine, answers, max_tokens))
    forwards.append(engine.take())
    progress()
    now = engine.metrics()
    engine.recording.only, engine.recording.columns = None, kept_columns(engine)
    return BatchedAnswers(replies, forwards, columns, now.preempted, now.reused_tokens)


def _num_pages(engine: RecordingEngine, answers: Sequence[RecordedAnswer]) -> int:
    """Return pages for a batch's prompts and first cycles, but not for all of its answers.

    They are enough for the longest sequence alone.
    """
    size, most = engine.page_size, engine.limits.max_batch_size
    prompts = sum(-(-(a.prompt_len + engine.num_tree_rows) // size) for a in answers[:most])
    longest = max(a.prompt_len + len(a.autoregressive) + engine.num_tree_rows for a in answers)
    return max(prompts, -(-min(longest, engine.limits.max_seq_len) // size))


def _ask(
    engine: RecordingEngine, answers: Sequence[RecordedAnswer], max_tokens: int
) -> list[Generation]:
    """Submit all requests at once, up to ``max_waiting``; each has its own reader thread."""
    found: list[Generation] = []
    wave = engine.limits.max_waiting
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for start in range(0, len(answers), wave):
        questions = [answer.case.question for answer in answers[start : start + wave]]
        asked = engine.submit_together(
            [Request(q.prompt, q.images, q.videos, sampling) for q in questions]
        )
        with ThreadPoolExecutor(len(asked)) as readers:
            found += readers.map(Answer.finish, asked)
    return found
