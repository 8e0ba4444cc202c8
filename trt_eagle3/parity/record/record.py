"""Record: all that one engine did for the prompts of a validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.parity.record import options as option_answers
from trt_eagle3.parity.record.answers import (
    RecordedAnswer,
    SampledAnswer,
    answer_cases,
    kept_columns,
    sample_cases,
)
from trt_eagle3.parity.record.batching import ROUNDS, BatchedAnswers, answer_batched
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.fp8_attention import Fp8Attention, record_fp8_attention
from trt_eagle3.parity.record.intermediates import layer_intermediates
from trt_eagle3.parity.record.options import OptionAnswers, answer_options
from trt_eagle3.parity.record.serving import ServedAnswers, answer_served
from trt_eagle3.parity.record.workload import Case

__all__ = ["NUM_SAMPLED", "SAMPLING", "Record", "Stage", "record_answers", "record_engine"]

# a high temperature, so that few tokens are near-certain
SAMPLING = SamplingParams(temperature=2.5, top_p=0.95)
NUM_SAMPLED = 3
"""Number of cases that are sampled."""

Stage = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""Times a named stage of so many steps; yields a function that counts one step."""


@dataclass(frozen=True)
class Record:
    """All that one engine did; its sessions are closed, so new sessions of the same graphs fit.

    Attributes:
        bound: static buffers of its sessions, including caches, by graph and name.
        intermediates: by answer, the target's layer outputs [n, H] by name.
        columns: vocabulary columns of verify logits that were kept; None: all.
        target_ids: int64 [Vd], the target's id of each draft id; None without a draft.
        fp8_attention: of the first answer, if keys and values are FP8.
    """

    engine: RecordingEngine
    answers: Sequence[RecordedAnswer]
    bound: Mapping[str, Mapping[str, Tensor]]
    intermediates: Sequence[Mapping[str, Tensor]]
    columns: Tensor | None = None
    sampled: Sequence[SampledAnswer] = ()
    batched: BatchedAnswers | None = None
    target_ids: Tensor | None = None
    fp8_attention: Fp8Attention | None = None
    options: OptionAnswers | None = None
    served: ServedAnswers | None = None


def record_engine(
    engine: RecordingEngine,
    cases: Sequence[Case],
    max_tokens: int,
    stage: Stage,
    *,
    sampling: bool = True,
    batching: bool = True,
    options: bool = True,
    serving: bool = True,
) -> Record:
    """Answer all cases, sample some, batch them, answer some with options, and serve them.

    Closes the engine's sessions afterwards.
    """
    chance = cases[:NUM_SAMPLED] if sampling else []
    with stage("answers", len(cases) + len(chance)) as step:
        answers = answer_cases(engine, cases, max_tokens, step)
        sampled = sample_cases(engine, chance, max_tokens, SAMPLING, step)
    batched = None
    if batching:
        with stage("batches", ROUNDS) as step:
            batched = answer_batched(engine, answers, max_tokens, step)
    asked = None
    if options:
        with stage("options", option_answers.ROUNDS) as step:
            asked = answer_options(engine, answers, max_tokens, step)
    served = None
    if serving:
        with stage("served answers", 1) as step:
            served = answer_served(engine, answers, max_tokens, step)
    columns, target_ids = kept_columns(engine), _target_ids(engine)
    with stage("intermediate tensors", len(cases)) as step:
        bound = engine.release()
        intermediates = layer_intermediates(engine, bound["target"], answers, step)
    fp8 = record_fp8_attention(engine, bound["target"], answers[0])
    return Record(
        engine=engine,
        answers=answers,
        bound=bound,
        intermediates=intermediates,
        columns=columns,
        sampled=sampled,
        batched=batched,
        target_ids=target_ids,
        fp8_attention=fp8,
        options=asked,
        served=served,
    )


def record_answers(
    engine: RecordingEngine, cases: Sequence[Case], max_tokens: int, step: Callable[[], object]
) -> Record:
    """Answer all cases, nothing more; then close the engine's sessions."""
    answers = answer_cases(engine, cases, max_tokens, step)
    bound = engine.release()
    intermediates = layer_intermediates(engine, bound["target"], answers, step)
    return Record(engine, answers, bound, intermediates)


def _target_ids(engine: RecordingEngine) -> Tensor | None:
    """Return the target id of every draft id, as decoding looks it up."""
    if engine.manifest is None or engine.drafter is None:
        return None
    ids = torch.arange(engine.manifest.draft_vocab_size)
    return engine.drafter.target_ids(ids.to(engine.device)).cpu()
