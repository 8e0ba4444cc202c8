"""TreeMasks: grammar masks of drafted trees, computed on the host while the target runs.

Shapes: B sequences, T tree nodes, V vocab, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_eagle3.decode.sampling.grammar_masks import fill_roots, fill_trees
from trt_eagle3.decode.sampling.logits_process import AllowedTokens
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.host_copy import Readback, host_buffer

__all__ = ["TreeMasks"]


class TreeMasks:
    """Copies drafted tokens to the host, and computes the grammar mask after each.

    Create it before the target is launched, so that the host waits only for the draft.
    """

    def __init__(self, samplers: Sequence[Sampler], proposal: Proposal) -> None:
        """Start the copy. ``samplers``: of the first rows of ``proposal``."""
        self._states = [(row, s.grammar) for row, s in enumerate(samplers) if s.grammar is not None]
        self._drafted: Readback | None = None
        self._num_nodes = proposal.tokens.shape[1]
        self._parents = proposal.parents
        self._has_parents = proposal.parents.device == proposal.tokens.device
        if self._states and self._num_nodes > 1:  # a root's mask needs no drafted token
            fields = [proposal.tokens]
            if self._has_parents:
                fields.append(proposal.parents)
            if proposal.num_kept is not None:
                fields.append(proposal.num_kept.long()[:, None].expand_as(proposal.tokens))
            self._drafted = Readback(torch.stack(fields))

    def compute(self, vocab_size: int, device: torch.device) -> AllowedTokens | None:
        """Compute the allowed tokens, on ``device``; None if nothing is forbidden."""
        if not self._states:
            return None
        num_rows, num_nodes = 1 + max(row for row, _ in self._states), self._num_nodes
        bits = host_buffer(
            (len(self._states) * num_nodes, -(-vocab_size // 32)), torch.int32, device
        )
        tokens, parents, kept = [[0]] * num_rows, [[-1]] * num_rows, [num_nodes] * num_rows
        if self._drafted is not None:
            fill_roots([state for _, state in self._states], bits.numpy())  # while the draft runs
            tokens, *others = self._drafted.wait()
            parents = others.pop(0) if self._has_parents else self._parents.tolist()
            if others:
                kept = [row[0] for row in others[0]]
        found = fill_trees(
            [(s, tokens[row][: kept[row]], parents[row][: kept[row]]) for row, s in self._states],
            bits.numpy(),
        )
        nodes = [[(row, node) for node in range(kept[row])] for row, _ in self._states]
        return AllowedTokens.from_masks(device, bits, found, nodes)
