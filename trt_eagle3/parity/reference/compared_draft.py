"""Compared draft: errors of one answer's draft rows against the reference's.

Shapes: n rows, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trt_eagle3.parity.metrics import Compared, RowErrors, row_errors
from trt_eagle3.parity.record.cycles import DraftRecord

__all__ = ["ComparedDraft", "Proposals", "logit_errors"]


@dataclass(frozen=True)
class Proposals:
    """The proposals of one cycle after ``row`` committed rows.

    ``count``: their number. ``wrong``: those that are not among the best of their parents.
    """

    row: int
    count: int
    wrong: Sequence[str]


@dataclass
class ComparedDraft:
    """One answer's draft rows, compared; ``record``: the rows as the engine ran them.

    Attributes:
        aux, fused, features, logits: errors of committed rows, then of drafted rows by step.
        inputs_embeds, position_ids: inputs of the rows, with the expected inputs.
    """

    case: str
    record: DraftRecord
    aux: list[RowErrors] = field(default_factory=list)
    fused: list[RowErrors] = field(default_factory=list)
    features: list[RowErrors] = field(default_factory=list)
    logits: list[RowErrors] = field(default_factory=list)
    inputs_embeds: list[Compared] = field(default_factory=list)
    position_ids: list[Compared] = field(default_factory=list)
    proposals: list[Proposals] = field(default_factory=list)


def logit_errors(
    case: str, tensor: str, ours: Sequence[Tensor | None], expected: Tensor
) -> list[RowErrors]:
    """Return errors of the rows whose logits [Vd] the engine computed."""
    pairs = [(row, want) for row, want in zip(ours, expected, strict=True) if row is not None]
    if not pairs:
        return []
    rows, wanted = (torch.stack(side) for side in zip(*pairs, strict=True))
    return [RowErrors(case, tensor, row_errors(rows, wanted))]
