"""Compared draft: errors of one answer's draft rows against the reference's.

Shapes: n rows, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import Compared, RowErrors, row_errors

__all__ = ["ComparedDraft", "DraftedToken", "Proposals", "logit_errors"]


@dataclass(frozen=True)
class Proposals:
    """The proposals of one cycle after ``row`` committed rows.

    ``count``: their number. ``wrong``: those that break ``rule``.
    """

    row: int
    count: int
    wrong: Sequence[str]
    rule: str


@dataclass(frozen=True)
class DraftedToken:
    """A token that a block drafted, and the reference's choice after the same tokens.

    Attributes:
        row: its sequence index.
        expected, got: target ids.
        margin: how far the reference's score of ``got`` is below its best.
        size: the root mean square of the reference's scores, the unit of ties.
    """

    case: str
    row: int
    expected: int
    got: int
    margin: float
    size: float


@dataclass
class ComparedDraft:
    """One answer's draft rows, compared.

    Attributes:
        verified: whether drafts were verified.
        aux, fused, features, logits: errors of committed rows, then of drafted rows by step; of
            block drafts those of the rows of blocks.
        context: errors of keys and values of a block draft's context rows.
        scores, confidence: errors of the outputs of a block draft's heads.
        tokens: the tokens that a block draft proposed.
        inputs_embeds, position_ids: inputs of the rows, with the expected inputs.
    """

    case: str
    verified: bool
    aux: list[RowErrors] = field(default_factory=list)
    fused: list[RowErrors] = field(default_factory=list)
    features: list[RowErrors] = field(default_factory=list)
    logits: list[RowErrors] = field(default_factory=list)
    inputs_embeds: list[Compared] = field(default_factory=list)
    position_ids: list[Compared] = field(default_factory=list)
    proposals: list[Proposals] = field(default_factory=list)
    context: list[RowErrors] = field(default_factory=list)
    scores: list[RowErrors] = field(default_factory=list)
    confidence: list[RowErrors] = field(default_factory=list)
    tokens: list[DraftedToken] = field(default_factory=list)


def logit_errors(
    case: str, tensor: str, ours: Sequence[Tensor | None], expected: Tensor
) -> list[RowErrors]:
    """Return errors of the rows whose logits [Vd] the engine computed."""
    pairs = [(row, want) for row, want in zip(ours, expected, strict=True) if row is not None]
    if not pairs:
        return []
    rows, wanted = (torch.stack(side) for side in zip(*pairs, strict=True))
    return [RowErrors(case, tensor, row_errors(rows, wanted))]
