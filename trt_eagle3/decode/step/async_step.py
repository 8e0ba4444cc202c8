"""Steps that run: what a device was given and whose outcome the host has not read yet.

Shapes: B sequences of a padded batch, T tree nodes, H target hidden, k aux layers, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.forward.device_batch import DeviceBatch, Seats
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import LogprobsAhead
from trt_eagle3.decode.speculation.draft_ahead import Tail
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.engine.session import Reduction
from trt_eagle3.host_copy import Readback

__all__ = ["NextForward", "PlainForward", "PlainStep", "TreeStep", "roots_after"]


@dataclass(frozen=True)
class PlainForward:
    """A forward of one row each that runs: ``reduced`` is what ``reduce`` makes of its logits
    [B, 1, V]; ``roots``: what it ran over.
    """

    seats: Seats
    roots: Proposal
    reduced: Tensor
    aux: Tensor | None
    reduce: Reduction | None


@dataclass(frozen=True)
class PlainStep:
    """A step of one row each that runs: ``tokens`` int64 [B] that it emits and, where a draft will
    want them, ``aux`` [B, k * H].
    """

    seats: Seats
    tokens: Tensor
    aux: Tensor | None
    readback: Readback
    logprobs: LogprobsAhead | None


@dataclass(frozen=True)
class TreeStep:
    """A speculative cycle that runs; ``readback``: its outcome.

    ``filtered``: the next trees are wanted once the host knows it.
    """

    seats: Seats
    tree: AnyTree
    tail: Tail
    readback: Readback
    logprobs: LogprobsAhead | None
    filtered: bool


@dataclass(frozen=True)
class NextForward:
    """The forward of ``sequences`` that follows the step ``after``; None: no step ran."""

    after: PlainStep | None
    sequences: Sequence[SequenceState]
    forward: PlainForward


def roots_after(before: PlainStep, batch: DeviceBatch, *, unchanged: bool) -> Tensor:
    """int64 [B]: the last token of each of ``batch``, of ``before`` or as the host knows it.

    ``unchanged``: the batch is that of ``before``.
    """
    emitted = before.tokens.clamp(min=0)
    if unchanged and len(emitted) == batch.size:
        return emitted
    emitted = emitted.index_select(0, batch.rows.clamp(min=0))
    return torch.where(batch.rows >= 0, emitted, batch.roots.long())
