"""What a forward of several sequences is given: rows padded to one width, masks, and proposals.

Shapes: B sequences, S rows of each in one forward, T tree nodes, H target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.propose import Proposal, tree_proposal
from trt_eagle3.decode.runner import AttentionMetadata, causal_mask
from trt_eagle3.decode.segment import Segment
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.state import LayerStates
from trt_eagle3.decode.tree import Tree

__all__ = ["causal_mask_of", "padded", "segment_metadata", "widened"]


def padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """[B, width] of ``rows`` [B][n], zeros behind."""
    return torch.stack([functional.pad(row, (0, width - len(row))) for row in rows])


_small_causal_mask = lru_cache(maxsize=32)(causal_mask)
"""Of the widths that captured steps have; on the host, where one that has not changed is not
copied again.
"""
_MAX_SMALL_MASK = 256


@lru_cache(maxsize=4)
def _large_causal_mask(width: int, device: torch.device) -> Tensor:
    """Of a prompt's chunk: on the host 2048 tokens would take several milliseconds, and as many
    to be copied.
    """
    rows = torch.arange(width, device=device)
    return rows[:, None] >= rows


def causal_mask_of(width: int, device: torch.device) -> Tensor:
    """bool [width, width]; sessions only read their inputs."""
    return (
        _small_causal_mask(width) if width <= _MAX_SMALL_MASK else _large_causal_mask(width, device)
    )


def segment_metadata(
    states: LayerStates, segments: Sequence[Segment], positions: Sequence[Tensor], embeds: Tensor
) -> AttentionMetadata:
    """The rows of B segments, each of which sees all rows of its sequence before it; ``positions``
    int32 [B][3, count].

    ``embeds`` [B, S, H] are the rows, padded.
    """
    width = embeds.shape[1]
    of_width = [functional.pad(p, (0, width - p.shape[1])) for p in positions]
    return AttentionMetadata(
        past=[s.start for s in segments],
        counts=[s.count for s in segments],
        state_inputs=states.inputs(
            [s.sequence for s in segments],
            [s.stop for s in segments],
            certain=[s.count for s in segments],
        ),
        mask=causal_mask_of(width, embeds.device).expand(len(segments), -1, -1),
        positions=torch.stack(of_width, dim=1),
        is_prompt=True,
    )


def widened(
    proposal: Proposal | None, rows: Sequence[int], sequences: Sequence[SequenceState]
) -> Proposal:
    """The proposal of the sequences at ``rows`` among all ``sequences``; the others have a root
    and padding.
    """
    roots = torch.tensor([s.tokens[-1] for s in sequences])[:, None]
    if proposal is None:
        return tree_proposal(Tree.root_only(), roots)
    if len(rows) == len(sequences):
        return proposal
    index = torch.tensor(rows)
    num_nodes = proposal.tokens.shape[1]
    alone = Proposal(
        tokens=roots.expand(-1, num_nodes),
        parents=torch.full((len(sequences), num_nodes), -1),
        depths=torch.zeros(len(sequences), num_nodes, dtype=torch.int64),
        mask=torch.eye(num_nodes, dtype=torch.bool).expand(len(sequences), -1, -1),
    )
    fields = {}
    for name, theirs in vars(proposal).items():
        ours = getattr(alone, name).to(theirs.device, non_blocking=True).contiguous()
        fields[name] = ours.index_copy(0, index.to(theirs.device, non_blocking=True), theirs)
    return Proposal(**fields)
