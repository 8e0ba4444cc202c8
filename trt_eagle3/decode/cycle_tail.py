"""What follows a verify step on the device: trees are accepted, the draft is extended by what was,
and proposes again.

Shapes: B sequences, T tree nodes, k aux layers, H target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from trt_eagle3.decode.device_batch import DeviceBatch
from trt_eagle3.decode.draft_ahead import DraftAhead, Tail
from trt_eagle3.decode.outcome import Outcome, accept_greedy, is_chain
from trt_eagle3.decode.propose import Proposal
from trt_eagle3.decode.transfer import Readback
from trt_eagle3.decode.tree import AnyTree, Tree

__all__ = ["CycleTail", "TreeShape", "tree_shape"]


class CycleTail:
    """Accepts greedy trees, extends the draft and proposes."""

    def __init__(self, draft: DraftAhead) -> None:
        self._draft = draft

    def run(
        self,
        tree: AnyTree,
        proposal: Proposal,
        target_ids: Tensor,
        aux: Tensor,
        batch: DeviceBatch,
        *,
        ahead: bool,
    ) -> tuple[Tail, Readback]:
        """After the target said ``target_ids`` int64 [B, T] (``greedy_tokens``): what the device
        knows, and what was said (``Outcome.packed``), which the host has before the draft is done.

        Args:
            aux: [B, T, k * H] of the nodes. ahead: whether the next trees are wanted.
        """
        outcome = _accept(tree, proposal, target_ids)
        said = Readback(outcome.packed())
        return self.after(tree, outcome, aux, batch, ahead=ahead), said

    def after(
        self, tree: AnyTree, outcome: Outcome, aux: Tensor, batch: DeviceBatch, *, ahead: bool
    ) -> Tail:
        """The same of trees that are accepted."""
        drafters = self._draft.extend(batch, outcome, aux, in_place=is_chain(tree))
        return Tail(
            path=outcome.path,
            logits=drafters.logits,
            features=drafters.features,
            prepared=self._draft.prepare(tree, drafters) if ahead else None,
        )


def _accept(tree: AnyTree, proposal: Proposal, target_ids: Tensor) -> Outcome:
    if isinstance(tree, Tree):
        shape, size = tree_shape(tree, target_ids.device), len(target_ids)
        parents, mask = shape.parents.expand(size, -1), shape.mask.expand(size, -1, -1)
        proposal = replace(proposal, parents=parents, mask=mask)
    return accept_greedy(proposal, target_ids, chain=is_chain(tree))


@dataclass(frozen=True)
class TreeShape:
    """A static tree on the device: ``parents`` int64 [T], ``depths`` int32 [T], ``mask`` bool
    [T, T].
    """

    parents: Tensor
    depths: Tensor
    mask: Tensor


@lru_cache(maxsize=32)
def tree_shape(tree: Tree, device: torch.device) -> TreeShape:
    """``tree`` on ``device``: it is not copied every time."""
    parents, depths = torch.tensor(tree.parents), tree.depths.int()
    return TreeShape(parents.to(device), depths.to(device), tree.mask.to(device))
