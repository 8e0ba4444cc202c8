"""What grammars allow at every node of drafted trees: computed on the host while the target runs.

Shapes: B sequences, T tree nodes, V vocab, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_eagle3.decode.sampling.grammar_masks import fill_roots, fill_trees
from trt_eagle3.decode.sampling.logits_process import AllowedTokens
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.host_copy import Readback, host_buffer

__all__ = ["TreeMasks"]


class TreeMasks:
    """Drafted tokens on their way to the host, and then what may follow each of them.

    Made before the target is launched, so that the host waits for the draft alone.
    """

    def __init__(self, samplers: Sequence[Sampler | None], proposal: Proposal) -> None:
        """``samplers``: of the first rows of ``proposal``; None of a row that nobody wants."""
        self._states = [
            (row, s.grammar)
            for row, s in enumerate(samplers)
            if s is not None and s.grammar is not None
        ]
        self._drafted: Readback | None = None
        self._num_nodes = proposal.tokens.shape[1]
        if self._states and self._num_nodes > 1:  # of a root alone the host knows enough
            fields = [proposal.tokens]
            if proposal.parents.device == proposal.tokens.device:
                fields.append(proposal.parents)
            self._parents = proposal.parents
            self._drafted = Readback(torch.stack(fields))

    def compute(self, vocab_size: int, device: torch.device) -> AllowedTokens | None:
        """What is allowed, on ``device``; None where nothing is forbidden."""
        if not self._states:
            return None
        shape = len(self._states) * self._num_nodes, -(-vocab_size // 32)
        bits = host_buffer(shape, torch.int32, device)
        num_rows = 1 + max(row for row, _ in self._states)
        tokens, parents = [[0]] * num_rows, [[-1]] * num_rows
        if self._drafted is not None:
            fill_roots([state for _, state in self._states], bits.numpy())  # while the draft runs
            tokens, *there = self._drafted.wait()
            parents = there[0] if there else self._parents.tolist()
        found = fill_trees(
            [(s, tokens[row], parents[row]) for row, s in self._states], bits.numpy()
        )
        nodes = [[(row, node) for node in range(self._num_nodes)] for row, _ in self._states]
        return AllowedTokens.from_masks(device, bits, found, nodes)
