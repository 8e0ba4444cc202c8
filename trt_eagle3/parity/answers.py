"""The engine's side: every case answered plainly and with speculation, and all of it recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.decode.sampling_params import SamplingParams
from trt_eagle3.multimodal import ModelInputs
from trt_eagle3.parity.record import Pass, RecordingEngine
from trt_eagle3.parity.workload import Case

__all__ = ["Answer", "Sampled", "answer_cases", "kept_columns", "sample_cases"]

# of one verify pass; of more (big vocabularies, big trees) only some columns are kept
_MAX_LOGITS = 4_000_000
_KEPT_COLUMNS = 8192


@dataclass(frozen=True)
class Answer:
    """One case and what the engine made of it.

    Attributes:
        inputs: as the engine's processor prepared them.
        plain, speculative: tokens of the answer; those without a draft have no speculative ones.
        vision, plain_passes, speculative_passes: recorded runs of the vision graph, of the target
            while it decoded plainly, of all graphs while it speculated.
        accepted_lengths: tokens that each verify pass emitted.
        text: of the plain answer, as it was streamed.
    """

    case: Case
    inputs: ModelInputs
    plain: tuple[int, ...]
    speculative: tuple[int, ...]
    vision: Pass | None
    plain_passes: Sequence[Pass]
    speculative_passes: Sequence[Pass]
    accepted_lengths: tuple[int, ...]
    text: str = ""

    @property
    def name(self) -> str:
        """The case's."""
        return self.case.name

    @property
    def prompt_len(self) -> int:
        """P."""
        return len(self.inputs.token_ids)

    @cached_property
    def token_ids(self) -> Tensor:
        """int64 [P + A]: prompt and plain answer."""
        return torch.cat([self.inputs.token_ids, torch.tensor(self.plain)])

    @property
    def num_rows(self) -> int:
        """P + A - 1: the last token is no row."""
        return len(self.token_ids) - 1

    @cached_property
    def visual_rows(self) -> Tensor:
        """bool [P + A - 1]."""
        rows = torch.zeros(self.num_rows, dtype=torch.bool)
        rows[: self.prompt_len] = self.inputs.visual_rows
        return rows

    @cached_property
    def agreed(self) -> int:
        """Tokens at the start of the answer that are the same with speculation and without."""
        pairs = zip(self.plain, self.speculative, strict=False)
        same = [a == b for a, b in pairs]
        return same.index(False) if False in same else len(same)


def answer_cases(
    engine: RecordingEngine, cases: Sequence[Case], max_tokens: int, progress: Callable[[], object]
) -> list[Answer]:
    """Answer every case; end tokens do not end an answer: each has ``max_tokens``, or as many as
    the limits let it.
    """
    return [_answer(engine, case, max_tokens, progress) for case in cases]


def _answer(
    engine: RecordingEngine, case: Case, max_tokens: int, progress: Callable[[], object]
) -> Answer:
    q = case.question
    media: dict[str, Any] = {
        "images": q.images,
        "videos": q.videos,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    inputs = engine.prepare(q.prompt, q.images, q.videos)
    engine.take()
    engine.kept.columns = None
    plain = engine.generate(q.prompt, speculation=False, **media)
    passes = engine.take()
    seen = next((p for p in passes if p.graph == "vision"), None)
    merged = engine.spec.vision.spatial_merge_size**2
    vision = (
        None if seen is None else without_padding(seen, int(inputs.grid_thw.prod(1).sum()), merged)
    )
    speculative: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    speculative_passes: list[Pass] = []
    if engine.manifest is not None:
        engine.kept.columns = kept_columns(engine)
        found = engine.generate(q.prompt, speculation=True, **media)
        speculative, lengths = found.token_ids, found.accepted_lengths
        speculative_passes = engine.take()
    progress()
    return Answer(
        case=case,
        inputs=inputs,
        plain=plain.token_ids,
        speculative=speculative,
        vision=vision,
        plain_passes=[p for p in passes if p.graph == "target"],
        speculative_passes=speculative_passes,
        accepted_lengths=lengths,
        text=plain.text,
    )


def without_padding(run: Pass, patches: int, merged: int) -> Pass:
    """A run of the vision graph over its first ``patches``: on CUDA a bucket's follow
    (``decode/runner.py``).

    ``merged``: patches of a visual token.
    """
    tokens, starts = patches // merged, run.inputs["frame_starts"]
    inputs = {
        name: x[:patches] if name == "patches" else x[..., :patches]
        for name, x in run.inputs.items()
    }
    inputs["frame_starts"] = starts[: int((starts < patches).sum()) + 1]
    outputs = {name: x[..., :tokens, :] for name, x in run.outputs.items()}
    return Pass(run.graph, inputs, outputs)


@dataclass(frozen=True)
class Sampled:
    """A sampled answer: the tokens [P] of its prompt, its own, and the target's recorded runs."""

    name: str
    prompt_ids: Tensor
    tokens: tuple[int, ...]
    passes: Sequence[Pass]


def sample_cases(
    engine: RecordingEngine,
    cases: Sequence[Case],
    max_tokens: int,
    sampling: SamplingParams,
    progress: Callable[[], object],
) -> list[Sampled]:
    """Answer by chance, with speculation where the whole logits of its passes can be kept; seeds
    count from 0.
    """
    speculation = engine.manifest is not None and kept_columns(engine) is None
    engine.kept.columns = None
    found = []
    for seed, case in enumerate(cases):
        q = case.question
        engine.take()
        answer = engine.generate(
            q.prompt,
            images=q.images,
            videos=q.videos,
            max_tokens=max_tokens,
            ignore_eos=True,
            speculation=speculation,
            sampling=replace(sampling, seed=seed),
        )
        passes = [p for p in engine.take() if p.graph == "target"]
        ids = engine.prepare(q.prompt, q.images, q.videos).token_ids
        found.append(Sampled(case.name, ids, answer.token_ids, passes))
        progress()
    engine.kept.columns = kept_columns(engine)
    return found


def kept_columns(engine: RecordingEngine, batch_size: int = 1) -> Tensor | None:
    """Columns of verify logits of so many sequences that are kept: None for all of them."""
    vocab, speculation = engine.spec.text.vocab_size, engine.record.config.speculation
    nodes = speculation.num_draft_tokens or speculation.steps * max(1, speculation.topk) + 1
    if batch_size * vocab * nodes <= _MAX_LOGITS:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(vocab, generator=generator)[:_KEPT_COLUMNS].sort().values
