"""Faults that a prompt alone never meets: of batches, of prefixes that are reused, of sequences
that are preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.parity.fault import MORE_TOKENS, Fault, gives
from tests.parity.planting import Planted, Tensors
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import Prefix
from trt_eagle3.decode.request import preprocess
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.request.vision_encoder import VisionEncoder
from trt_eagle3.decode.schedule.scheduler import Scheduler


def _blurred(_: Tensors, outputs: Tensors) -> Tensors:
    """Logits of all sequences but the first are 1 % too large."""
    logits = outputs["logits"].clone()
    logits[1:] *= 1.01
    return {**outputs, "logits": logits}


def _astray(_: Tensors, outputs: Tensors) -> Tensors:
    """The draft's logits of all sequences but the first belong to other tokens."""
    logits = outputs["logits"].clone()
    logits[1:] = logits[1:].roll(1, dims=-1)
    return {**outputs, "logits": logits}


def _same_page(p: Planted) -> None:
    true = PrefixCache.match

    def match(self: PrefixCache, *args: Any, **options: Any) -> Prefix:
        pages = true(self, *args, **options).pages
        return Prefix(pages[:1] * len(pages))

    p.patch.setattr(PrefixCache, "match", match)


def _blind(p: Planted) -> None:
    true = preprocess.media_digests
    p.patch.setattr(
        preprocess, "media_digests", lambda *args: tuple((b"", count) for _, count in true(*args))
    )


def _forgetful(p: Planted) -> None:
    true = Scheduler._preempt

    def preempt(self: Scheduler, sequence: SequenceState) -> None:
        true(self, sequence)
        if sequence.tokens:
            sequence.tokens[-1] += 1

    p.patch.setattr(Scheduler, "_preempt", preempt)


def _overwritten(p: Planted) -> None:
    """What a captured graph does to its outputs, and nobody keeps a copy."""
    true = VisionEncoder.encode
    buffers: dict[tuple[int, ...], Vision] = {}

    def encode(self: VisionEncoder, prompt: Prompt) -> Vision:
        made = true(self, prompt)
        copied = Vision(made.embeds.clone(), made.visual_levels.clone())
        found = buffers.setdefault(tuple(made.embeds.shape), copied)
        found.embeds.copy_(made.embeds)
        found.visual_levels.copy_(made.visual_levels)
        return found

    p.patch.setattr(VisionEncoder, "encode", encode)


BATCH: Mapping[str, Fault] = {
    "rows of a batch blurred": Fault(
        "logits of all sequences of a batch but the first are 1 % too large",
        "batch.logits",
        "logits",
        gives("target", _blurred),
        looks=("batch",),
    ),
    "draft of a batch": Fault(
        "the draft is right for the first sequence of a batch alone",
        "batch.acceptance",
        "position 0",
        gives("draft", _astray),
        looks=("batch",),
    ),
    "reused page": Fault(
        "a prompt that is known already finds its first page everywhere",
        "batch.tokens",
        "tokens",
        _same_page,
        looks=("batch",),
    ),
    "images alike": Fault(
        "prompts that differ in their image alone share their pages",
        "batch.tokens",
        "tokens",
        _blind,
        looks=("batch",),
    ),
    "images overwritten": Fault(
        "the images of a prompt that is not prefilled yet are overwritten by the next one's of "
        "the same size",
        "batch.tokens",
        "tokens",
        _overwritten,
        looks=("batch",),
    ),
    "preempted": Fault(
        "a preempted sequence goes on from another token",
        "batch.tokens",
        "tokens",
        _forgetful,
        looks=("batch",),
        max_tokens=MORE_TOKENS,
    ),
}
