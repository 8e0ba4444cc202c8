"""Drafter: the interface between decoding and a draft.

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
    """Output of ``extend``. Only the drafter that made it reads it."""


class Drafter(Protocol):
    """Proposes trees, and keeps its own rows for every sequence with ``drafting``.

    ``backfill`` holds the rows that were decoded without the draft. Only the drafter tracks whether
    its rows are up to date.
    """

    backfill: DraftBackfill

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map the draft's token ids to the target's, both int64 [...]."""
        ...

    def capture_prompts(self, max_rows: int, table_len: int, has_room: Callable[[], bool]) -> None:
        """Capture forwards over up to ``max_rows`` prompt rows, as far as possible.

        Stops when ``has_room`` is False. ``table_len``: pages in a page table.
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
        """Propose a ``tree`` for each row of ``batch``.

        ``num_kept`` is 1 for a sequence that does not speculate.
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
        """Overwrite drafted rows of accepted tokens by rows from the target's hidden states.

        Args:
            aux: [B, T, k * H] of the nodes. ahead: also propose the next trees.
        """
        ...

    def keep(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[int],
        output: DraftOutput,
    ) -> None:
        """Store ``output`` for ``sequences``, at ``rows`` of the batch.

        Called when their tokens are on the host.
        """
        ...

    def waits_for_host(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether proposing the next trees requires the last tokens on the host."""
        ...

    def propose_ahead(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> None:
        """Propose the next trees of sequences whose tokens are on the host."""
        ...

    def dummy_proposal(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Propose trees for a batch of padding, so that graphs of these shapes are captured.

        Their tokens are spread over the vocabulary.
        """
        ...
