"""Inputs of a forward over rows of several sequences: padded rows, masks, positions.

Shapes: B sequences, S rows of each in one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.forward.runner import AttentionMetadata, causal_mask
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.state import LayerStates

__all__ = [
    "causal_mask_of",
    "of_width",
    "padded",
    "segment_inputs",
    "segment_metadata",
    "segment_positions",
]


def padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Stack ``rows`` [B][n] to [B, width], padded with zeros."""
    return torch.stack([functional.pad(row, (0, width - len(row))) for row in rows])


def of_width(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Cut or zero-pad ``tensor`` to ``width`` rows in ``dim``; a cut is a view."""
    more = width - tensor.shape[dim]
    if more <= 0:  # padding by 0 would copy
        return tensor.narrow(dim, 0, width)
    return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, more))


_small_causal_mask = lru_cache(maxsize=32)(causal_mask)
"""Masks for the widths of captured steps, on the host: a session does not copy an unchanged host
input again.
"""
_MAX_SMALL_MASK = 256


@lru_cache(maxsize=4)
def _large_causal_mask(width: int, device: torch.device) -> Tensor:
    """Make the mask of a prompt chunk on the device.

    On the host, 2048 tokens would take several milliseconds to compute, and several to copy.
    """
    rows = torch.arange(width, device=device)
    return rows[:, None] >= rows


def causal_mask_of(width: int, device: torch.device) -> Tensor:
    """Return the lower-triangular mask bool [width, width]. It is shared: read-only."""
    return (
        _small_causal_mask(width) if width <= _MAX_SMALL_MASK else _large_causal_mask(width, device)
    )


def segment_positions(segments: Sequence[Segment], width: int) -> Tensor:
    """Return the target's rope positions of each segment's rows, int32 [3, B, width + 1].

    The row after a segment is included. Padding is 0.
    """
    found = torch.zeros(3, len(segments), width + 1, dtype=torch.int32)
    for i, s in enumerate(segments):
        found[:, i, : s.count + 1] = s.sequence.prompt.positions(s.start, s.stop + 1)
    return found


def segment_inputs(states: LayerStates, segments: Sequence[Segment]) -> dict[str, Tensor]:
    """Return the graph inputs that locate the states of ``segments``."""
    return states.inputs(
        [s.sequence for s in segments],
        [s.stop for s in segments],
        certain=[s.count for s in segments],
    )


def segment_metadata(
    segments: Sequence[Segment],
    positions: Tensor,
    state_inputs: Mapping[str, Tensor],
    device: torch.device,
) -> AttentionMetadata:
    """Describe the rows of B segments; each row attends to all earlier rows of its sequence.

    Args:
        positions: int32 [3, B, S]. state_inputs: as from ``segment_inputs``.
    """
    width = positions.shape[2]
    # a single segment's run may be captured; for several, a host copy would be B times as large
    alone = len(segments) == 1
    mask = causal_mask_of(width, device) if alone else _large_causal_mask(width, device)
    return AttentionMetadata(
        past=[s.start for s in segments],
        counts=[s.count for s in segments],
        state_inputs=state_inputs,
        mask=mask.expand(len(segments), -1, -1),
        positions=positions,
        is_prompt=True,
    )
