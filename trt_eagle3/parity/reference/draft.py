"""Protocol of a draft's reference; the implementations of each kind are in ``drafts/``.

Shapes: T rows, n rows before them, k aux states, Ht target hidden, Hd draft hidden, Vd draft vocab,
R rows of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest

__all__ = ["DraftRows", "KeysValues", "ReferenceDraft", "attend"]

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""Per layer, keys and values [n, Hkv, D] of rows."""


@dataclass(frozen=True)
class DraftRows:
    """The outputs of a run over T rows.

    Attributes:
        logits: [R, Vd].
        features: [T, Hd], the input that each row passes to the next.
        memory: keys and values of the T rows.
        intermediates: tensors [T, ...] by name in the draft graph, in order of computation.
    """

    logits: Tensor
    features: Tensor
    memory: KeysValues
    intermediates: Mapping[str, Tensor]


class ReferenceDraft(Protocol):
    """A draft in plain PyTorch, written from its equations."""

    @property
    def manifest(self) -> DraftManifest:
        """The manifest read from the checkpoint."""
        ...

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Canonical name -> tensor; ``d2t`` on the CPU."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all computations."""
        ...

    def fuse(self, aux: Tensor) -> Tensor:
        """Features [T, Hd] of concatenated aux hidden states [T, k * Ht]."""
        ...

    def run(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        before: KeysValues = (),
        logit_rows: Tensor | None = None,
    ) -> DraftRows:
        """Run T rows after ``before``.

        Args:
            embeds: [T, Hd] of the tokens one ahead.
            features: [T, Hd].
            positions: [3, T].
            mask: bool [T, n + T]: rows that each row sees, those of ``before`` first, itself
                included.
            logit_rows: int64 [R]; None: all rows.
        """
        ...


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    before: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """Attention output [T, Hq * D]: softmax of ``scale * q k`` over the rows that each row sees.

    Args:
        q: [T, Hq, D].
        k, v: [T, Hkv, D]; Hq / Hkv query heads read each head.
        mask: bool [T, n + T].
        before: keys and values [n, Hkv, D].
    """
    if before is not None:
        k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(~mask.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
