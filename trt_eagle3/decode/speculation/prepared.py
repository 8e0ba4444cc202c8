"""PreparedTrees: trees that were proposed ahead of the step that verifies them.

Shapes: B sequences of a padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.forward.device_batch import BatchRows, DeviceBatch
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.speculation.proposal import Proposal, is_chain
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.host_copy import to_device

__all__ = ["PreparedTrees", "num_kept_of"]


class PreparedTrees:
    """Holds at most one proposal, for sequences that are unchanged since."""

    def __init__(self) -> None:
        self._rows: BatchRows | None = None
        self._proposal: Proposal | None = None

    def put(
        self, sequences: Sequence[SequenceState], rows: Sequence[int], proposal: Proposal
    ) -> None:
        """Hold the trees of ``sequences``, at ``rows`` of ``proposal``."""
        self._rows = BatchRows(sequences, [s.num_computed_tokens for s in sequences], rows)
        self._proposal = proposal

    def take(self, sequences: Sequence[SequenceState], tree: AnyTree, size: int) -> Proposal | None:
        """Return the trees of ``sequences``, cut to ``tree`` and padded to ``size`` rows.

        None if they are for other sequences or have another shape. Nothing is held afterwards.
        """
        batch_rows, proposal = self._rows, self._proposal
        self._rows = self._proposal = None
        if batch_rows is None or proposal is None:
            return None
        shorter = is_chain(tree) and proposal.is_chain and tree.num_nodes < proposal.tree.num_nodes
        if proposal.tree != tree and not shorter:
            return None
        rows = batch_rows.rows_of(sequences)
        if min(rows) < 0:
            return None
        if shorter:
            proposal = proposal.cut(tree)
        if len(proposal.tokens) == size and rows == list(range(len(rows))):
            return proposal
        index = torch.tensor(rows + [0] * (size - len(rows)))
        return proposal.at(to_device(index, proposal.tokens.device))


def num_kept_of(speculates: Sequence[bool], tree: AnyTree, batch: DeviceBatch) -> Tensor | None:
    """Return ``Proposal.num_kept`` of a batch in which only some sequences speculate; None if all
    do.
    """
    if all(speculates):
        return None
    kept = [tree.num_nodes if s else 1 for s in speculates]
    kept += [1] * (batch.size - len(kept))
    return to_device(torch.tensor(kept, dtype=torch.int32), batch.num_computed_tokens.device)
