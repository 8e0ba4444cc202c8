"""Inputs of a forward over rows of several sequences: rows padded to one width, masks, positions.

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
    """[B, width] of ``rows`` [B][n], zeros behind."""
    return torch.stack([functional.pad(row, (0, width - len(row))) for row in rows])


def of_width(tensor: Tensor, width: int, dim: int) -> Tensor:
    """``tensor`` with ``width`` rows in ``dim``: a view of the first ones, or zeros behind."""
    more = width - tensor.shape[dim]
    if more <= 0:  # padding by 0 would copy
        return tensor.narrow(dim, 0, width)
    return functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, more))


_small_causal_mask = lru_cache(maxsize=32)(causal_mask)
"""Of the widths that captured steps have; on the host, where one that has not changed is not
copied again.
"""
_MAX_SMALL_MASK = 256


@lru_cache(maxsize=4)
def _large_causal_mask(width: int, device: torch.device) -> Tensor:
    """Of a prompt's chunk, on the device: on the host 2048 tokens would take several milliseconds,
    and as many to be copied.
    """
    rows = torch.arange(width, device=device)
    return rows[:, None] >= rows


def causal_mask_of(width: int, device: torch.device) -> Tensor:
    """bool [width, width]; sessions only read their inputs."""
    return (
        _small_causal_mask(width) if width <= _MAX_SMALL_MASK else _large_causal_mask(width, device)
    )


def segment_positions(segments: Sequence[Segment], width: int) -> Tensor:
    """int32 [3, B, width + 1]: the target's rope positions of every segment's rows, and of the row
    after them; zeros behind.
    """
    found = torch.zeros(3, len(segments), width + 1, dtype=torch.int32)
    for i, s in enumerate(segments):
        found[:, i, : s.count + 1] = s.sequence.prompt.positions(s.start, s.stop + 1)
    return found


def segment_inputs(states: LayerStates, segments: Sequence[Segment]) -> dict[str, Tensor]:
    """The graph's inputs that say where the states of ``segments`` lie."""
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
    """The rows of B segments, each of which sees all rows of its sequence before it.

    Args:
        positions: int32 [3, B, S]. state_inputs: as of ``segment_inputs``.
    """
    width = positions.shape[2]
    # of one alone a run may be captured; of several a copy on the host would be B times as large
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
