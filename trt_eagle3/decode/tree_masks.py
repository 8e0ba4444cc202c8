"""What grammars allow at every node of drafted trees: computed on the host while the target runs.

Shapes: B sequences, T tree nodes, V vocab, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from trt_eagle3.decode.grammar_state import GrammarState, Words
from trt_eagle3.decode.logits_process import AllowedTokens
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.sampling import Sampler
from trt_eagle3.decode.transfer import Readback, to_device

__all__ = ["TreeMasks"]

_MAX_THREADS = 8


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
        if self._states:
            device = proposal.tokens.device
            parents = proposal.parents.to(device, non_blocking=True)
            self._drafted = Readback(torch.stack([proposal.tokens, parents]))

    def compute(self, vocab_size: int, device: torch.device) -> AllowedTokens | None:
        """What is allowed, on ``device``; None where no sequence has a grammar."""
        if self._drafted is None:
            return None
        tokens, parents = self._drafted.wait()
        shape = len(self._states), len(tokens[0]), -(-vocab_size // 32)
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        jobs = [
            (state, tokens[row], parents[row], rows)
            for (row, state), rows in zip(self._states, bits.numpy(), strict=True)
        ]
        fill_all(jobs)
        return AllowedTokens([row for row, _ in self._states], to_device(bits, device))


def fill_all(jobs: Sequence[tuple[GrammarState, list[int], list[int], Words]]) -> None:
    """Fill the rows of several trees, on several threads."""
    if len(jobs) == 1:
        _fill(jobs[0])
    else:
        list(_threads().map(_fill, jobs))


def _fill(job: tuple[GrammarState, list[int], list[int], Words]) -> None:
    state, tokens, parents, rows = job
    state.fill(tokens, parents, rows)


@cache
def _threads() -> ThreadPoolExecutor:
    """The matcher computes without Python's lock."""
    count = max(min((os.cpu_count() or 2) - 1, _MAX_THREADS), 1)
    return ThreadPoolExecutor(count, "trt-eagle3-grammar")
