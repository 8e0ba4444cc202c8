"""How the device judges the trees of a batch, whoever samples: what the target makes of every node,
and what that accepts.

Shapes: B sequences of a padded batch, T tree nodes, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.outcome import Outcome, accept_drawn, on_device
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.transfer import to_device
from trt_eagle3.decode.tree import AnyTree
from trt_eagle3.decode.tree_masks import TreeMasks
from trt_eagle3.decode.verify import judge_trees

__all__ = ["judged_outcome", "take_draws", "wants_only_tokens"]


def wants_only_tokens(sequences: Sequence[SequenceState]) -> bool:
    """Whether the likeliest token of the target's raw logits is all that any wants of a node."""
    return all(
        s.sampling.greedy and not s.sampling.changes_logits and s.sampling.logprobs is None
        for s in sequences
    )


def judged_outcome(
    sequences: Sequence[SequenceState],
    tree: AnyTree,
    proposal: Proposal,
    logits: Tensor,
    masks: TreeMasks,
) -> Outcome:
    """What ``sequences``, the first rows of ``logits`` f32 [B, T, V], say to trees of ``tree``.

    Their random numbers stay the next ones until ``take_draws``: a pass may be forgotten.
    """
    count, (size, num_nodes) = len(sequences), proposal.tokens.shape
    placed = on_device(tree, proposal, logits.device)
    first = Proposal(**{name: field[:count] for name, field in vars(placed).items()})
    # whoever samples, and is followed by no draft, says the same with and without others' trees
    nodes = [num_nodes if s.drafting or s.sampling.greedy else 1 for s in sequences]
    draws = [
        [0.0] * (1 + num_nodes) if s.sampling.greedy else s.sampler.upcoming(1 + num_nodes)
        for s in sequences
    ]
    judged = judge_trees(
        [s.sampler for s in sequences], first, logits[:count], nodes, masks, [d[0] for d in draws]
    )
    chances = judged.chances
    if chances is None:
        chances = (judged.bonus.gather(1, first.parents.clamp(min=0)) == first.tokens).double()
    flat = torch.tensor([*chain.from_iterable(d[1:] for d in draws)], dtype=torch.float64)
    uniform = to_device(flat.view(count, num_nodes), logits.device)
    padding = (0, 0, 0, size - count)
    return accept_drawn(
        placed, *(functional.pad(field, padding) for field in (chances, judged.bonus, uniform))
    )


def take_draws(sequence: SequenceState, count: int) -> None:
    """``sequence`` goes on by a pass that used ``count`` random numbers and its bonus token's."""
    if not sequence.sampling.greedy:
        sequence.sampler.skip(1 + count)
