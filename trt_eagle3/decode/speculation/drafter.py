"""Drafter: a draft, as decoding sees it.

Shapes: B sequences of a padded batch, S rows of each, T tree nodes, D nodes of the deepest path, k
aux layers, H target hidden, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.backfill import DraftBackfill
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree

__all__ = ["DraftOutput", "Drafter"]


class DraftOutput(Protocol):
    """What a drafter knows after ``extend``; only that drafter reads it."""


class Drafter(Protocol):
    """Proposes trees, and keeps rows of its own for every sequence with ``drafting``.

    ``backfill`` holds the rows that were decoded without it. Nobody else knows whether a draft's
    rows are up to date.
    """

    backfill: DraftBackfill

    def capture_prompts(self, max_rows: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture what can be of forwards over up to ``max_rows`` rows of prompts, while
        ``has_room``. ``table_len``: pages in a page table.
        """
        ...

    def prefill(self, rows: PromptRows, next_ids: Tensor, page_table: Tensor, aux: Tensor) -> None:
        """Run over rows of prompts.

        Args:
            next_ids: int64 [B, S]: the token after each row. page_table: int32 [B, P], the
                target's. aux: [B, S, k * H].
        """
        ...

    def propose(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        batch: DeviceBatch,
        speculates: Sequence[bool],
    ) -> Proposal:
        """A ``tree`` for each row of ``batch``; ``num_kept`` is 1 where a sequence does not
        speculate.
        """
        ...

    def extend(
        self,
        batch: DeviceBatch,
        proposal: Proposal,
        paths: AcceptedPaths,
        aux: Tensor,
        *,
        ahead: bool,
    ) -> DraftOutput:
        """Overwrite drafted rows by rows with the target's states, of what was accepted.

        Args:
            aux: [B, T, k * H] of the nodes. ahead: propose the next trees, too.
        """
        ...

    def keep(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[int],
        output: DraftOutput,
    ) -> None:
        """Remember ``output`` of ``sequences``, at ``rows`` of the batch, now that the host knows
        their tokens.
        """
        ...

    def waits_for_host(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether the next trees can be proposed only once the host knows the last tokens."""
        ...

    def propose_ahead(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> None:
        """Propose the next trees of sequences whose tokens the host knows."""
        ...

    def dummy_proposal(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Trees for a batch of padding, so that graphs of these shapes are captured; their tokens
        are spread over the vocabulary.
        """
        ...
