"""Answers: every case without and with speculation, or sampled, and the recorded forwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.decode.request.request import Generation
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.families.registry import tower_of
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.record.engine import RecordedForward, RecordingEngine
from trt_eagle3.parity.record.workload import Case

__all__ = [
    "RecordedAnswer",
    "SampledAnswer",
    "answer_cases",
    "kept_columns",
    "sample_cases",
    "served_answers",
]

# logits of one verify forward; above this (big vocabularies, big trees) only some columns are kept
_MAX_LOGITS = 4_000_000
_KEPT_COLUMNS = 8192


@dataclass(frozen=True)
class RecordedAnswer:
    """One case and the engine's answers to it.

    Attributes:
        inputs: as the engine's processor prepared them.
        autoregressive, speculative: tokens of the answer, without and with speculation; without a
            draft ``speculative`` is empty.
        vision: the recorded run of the vision graph.
        autoregressive_forwards: the target's forwards without speculation.
        speculative_forwards: forwards of all graphs with speculation.
        accepted_lengths: as in ``Generation``, of the speculative answer.
        text: the streamed text of the autoregressive answer.
        served_len: tokens up to the first end token, which counts: where a request would end.
    """

    case: Case
    inputs: ModelInputs
    autoregressive: tuple[int, ...]
    speculative: tuple[int, ...]
    vision: RecordedForward | None
    autoregressive_forwards: Sequence[RecordedForward]
    speculative_forwards: Sequence[RecordedForward]
    accepted_lengths: tuple[int, ...]
    text: str = ""
    served_len: int = 0

    @property
    def name(self) -> str:
        """The case's name."""
        return self.case.name

    @property
    def prompt_len(self) -> int:
        """P: tokens of the prompt."""
        return len(self.inputs.token_ids)

    @cached_property
    def token_ids(self) -> Tensor:
        """int64 [P + A]: prompt and autoregressive answer."""
        return torch.cat([self.inputs.token_ids, torch.tensor(self.autoregressive)])

    @property
    def num_rows(self) -> int:
        """P + A - 1: the last token has no row."""
        return len(self.token_ids) - 1

    @cached_property
    def visual_rows(self) -> Tensor:
        """bool [P + A - 1]: rows of visual tokens."""
        rows = torch.zeros(self.num_rows, dtype=torch.bool)
        rows[: self.prompt_len] = self.inputs.visual_rows
        return rows

    @cached_property
    def agreed(self) -> int:
        """Number of equal tokens at the start, with and without speculation."""
        pairs = zip(self.autoregressive, self.speculative, strict=False)
        same = [a == b for a, b in pairs]
        return same.index(False) if False in same else len(same)


def answer_cases(
    engine: RecordingEngine, cases: Sequence[Case], max_tokens: int, progress: Callable[[], object]
) -> list[RecordedAnswer]:
    """Answer every case.

    End tokens do not end an answer: each has ``max_tokens``, or as many as the limits allow.
    """
    return [_answer(engine, case, max_tokens, progress) for case in cases]


def _answer(
    engine: RecordingEngine, case: Case, max_tokens: int, progress: Callable[[], object]
) -> RecordedAnswer:
    q = case.question
    inputs = engine.prepare(q.prompt, q.images, q.videos)
    found, forwards = _generate(engine, case, max_tokens, None, speculation=False)
    answer = RecordedAnswer(
        case=case,
        inputs=inputs,
        autoregressive=found.token_ids,
        speculative=(),
        vision=_vision_of(engine, forwards, inputs),
        autoregressive_forwards=[f for f in forwards if f.graph == "target"],
        speculative_forwards=[],
        accepted_lengths=(),
        text=found.text,
        served_len=_served_len(found.token_ids, engine.processor.end_token_ids),
    )
    if engine.manifest is not None:
        answer = _with_speculation(engine, answer, max_tokens)
    progress()
    return answer


def _served_len(tokens: Sequence[int], end_ids: Collection[int]) -> int:
    ends = [place + 1 for place, token in enumerate(tokens) if token in end_ids]
    return ends[0] if ends else len(tokens)


def served_answers(answers: Sequence[RecordedAnswer]) -> list[bool]:
    """Return which answers are to the user's own prompts; all are if there are none."""
    own = [answer.case.own for answer in answers]
    return own if any(own) else [True] * len(own)


def _with_speculation(
    engine: RecordingEngine, answer: RecordedAnswer, max_tokens: int
) -> RecordedAnswer:
    columns = kept_columns(engine)
    found, forwards = _generate(engine, answer.case, max_tokens, columns, speculation=True)
    return replace(
        answer,
        speculative=found.token_ids,
        speculative_forwards=forwards,
        accepted_lengths=found.accepted_lengths,
    )


def _generate(
    engine: RecordingEngine,
    case: Case,
    max_tokens: int,
    columns: Tensor | None,
    **options: Any,
) -> tuple[Generation, list[RecordedForward]]:
    """Answer one case; return its forwards, with these ``columns`` of the target's logits."""
    q = case.question
    engine.take()
    engine.recording.columns = columns
    found = engine.generate(
        q.prompt,
        images=q.images,
        videos=q.videos,
        max_tokens=max_tokens,
        ignore_eos=True,
        **options,
    )
    return found, engine.take()


def _vision_of(
    engine: RecordingEngine, forwards: Sequence[RecordedForward], inputs: ModelInputs
) -> RecordedForward | None:
    """Return the runs of the vision graph as one run over all images and videos of a prompt."""
    seen = [f for f in forwards if f.graph == "vision"]
    if not seen:
        return None
    vision, tower = engine.spec.require_vision(), tower_of(engine.spec)
    runs = [
        without_padding(
            run,
            tower.inputs(vision, grid[None]),
            int(grid.prod()),
            vision.spatial_merge_size**2,
        )
        for run, grid in zip(seen, inputs.grid_thw, strict=True)
    ]
    patches = torch.cat([run.inputs["patches"] for run in runs])
    outputs = {
        name: torch.cat([run.outputs[name] for run in runs], dim=-2) for name in seen[0].outputs
    }
    rows = tower.inputs(vision, inputs.grid_thw)
    return RecordedForward("vision", {"patches": patches, **rows}, outputs)


def without_padding(
    run: RecordedForward, rows: dict[str, Tensor], patches: int, merged: int
) -> RecordedForward:
    """Cut a run of the vision graph to its first ``patches``.

    On CUDA the patches are padded to the size of a bucket (``decode/forward/runner.py``).

    Args:
        rows: the run's other inputs, for these patches alone.
        merged: patches of a visual token.
    """
    tokens = patches // merged
    inputs = {"patches": run.inputs["patches"][:patches], **rows}
    outputs = {name: x[..., :tokens, :] for name, x in run.outputs.items()}
    return RecordedForward(run.graph, inputs, outputs)


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer: prompt tokens [P], answer tokens, and the target's recorded forwards."""

    name: str
    prompt_ids: Tensor
    tokens: tuple[int, ...]
    forwards: Sequence[RecordedForward]


def sample_cases(
    engine: RecordingEngine,
    cases: Sequence[Case],
    max_tokens: int,
    sampling: SamplingParams,
    progress: Callable[[], object],
) -> list[SampledAnswer]:
    """Sample an answer to each case; seeds count from 0.

    Speculates if the whole logits of its forwards can be kept.
    """
    whole = engine.manifest is not None and kept_columns(engine) is None
    found = []
    for seed, case in enumerate(cases):
        options = {"speculation": whole, "sampling": replace(sampling, seed=seed)}
        answer, forwards = _generate(engine, case, max_tokens, None, **options)
        q = case.question
        ids = engine.prepare(q.prompt, q.images, q.videos).token_ids
        targets = [f for f in forwards if f.graph == "target"]
        found.append(SampledAnswer(case.name, ids, answer.token_ids, targets))
        progress()
    engine.recording.columns = kept_columns(engine)
    return found


def kept_columns(engine: RecordingEngine, batch_size: int = 1) -> Tensor | None:
    """Return the columns of verify logits to keep for ``batch_size`` sequences; None: all."""
    vocab, speculation = engine.spec.vocab_size, engine.record.config.speculation
    nodes = speculation.num_draft_tokens or speculation.steps * max(1, speculation.topk) + 1
    if batch_size * vocab * nodes <= _MAX_LOGITS:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(vocab, generator=generator)[:_KEPT_COLUMNS].sort().values
