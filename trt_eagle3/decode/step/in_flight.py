"""The stages of a step: ``Forward`` -> ``InFlight`` -> ``StepOutput``.

Shapes: B sequences of a padded batch, T tree nodes, k aux layers, H target hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trt_eagle3.decode.forward.device_batch import BatchRows, DeviceBatch
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling.logprobs import LogprobsReadback
from trt_eagle3.decode.speculation.accept import Accepted
from trt_eagle3.decode.speculation.drafter import DraftOutput
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.speculation.verify import LogitsForm
from trt_eagle3.host_copy import Readback

__all__ = ["Forward", "InFlight", "StepOutput"]


@dataclass(frozen=True)
class Forward:
    """A launched target forward over a tree or a root of each sequence.

    Attributes:
        sequences: the first rows of ``batch``. rows: the same, with their row counts.
        speculates: which sequences have drafts; empty if no tree was proposed.
        reduced: the output that ``logits_form`` names: tokens int64 [B, T] or logits [B, T, V].
        aux: aux hidden states [B, T, k * H]; None without a draft.
        after: the previous step, whose tokens are the roots; None if the host had the roots.
    """

    sequences: Sequence[SequenceState]
    rows: BatchRows
    batch: DeviceBatch
    proposal: Proposal
    speculates: Sequence[bool]
    logits_form: LogitsForm
    reduced: Tensor
    aux: Tensor | None
    after: InFlight | None = None


@dataclass(frozen=True)
class InFlight:
    """A step whose tokens are being copied to the host.

    Attributes:
        rows: the batch row of each sequence.
        tree: the verified tree; None without a draft. speculates: which sequences have drafts.
        last: int64 [B] the last token of each sequence, on the device.
        readback: the copy of ``AcceptedPaths.packed``.
        drafted: the drafter's output after the step; None without a tree.
        deferred: aux hidden states [B, k * H] to keep for backfill; None if not needed.
        waits_for_host: whether proposing the next trees requires the tokens on the host.
    """

    rows: BatchRows
    tree: AnyTree | None
    speculates: Sequence[bool]
    last: Tensor
    readback: Readback
    logprobs: LogprobsReadback | None = None
    drafted: DraftOutput | None = None
    deferred: Tensor | None = None
    waits_for_host: bool = False


@dataclass(frozen=True)
class StepOutput:
    """The tokens that a step emitted.

    Attributes:
        accepted: the result of each sequence; None if it was not in the step.
        tree: the verified tree of sequences with ``Accepted.tree_depth``; None without one.
        num_backfilled: rows that were backfilled in the step.
    """

    accepted: Sequence[Accepted | None]
    tree: AnyTree | None
    num_backfilled: int = 0
