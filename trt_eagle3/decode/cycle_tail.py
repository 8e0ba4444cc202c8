"""What follows a verify step on the device: trees are accepted, the draft is extended by what was,
and proposes again. Of trees of fixed shape it can be one CUDA graph.

Shapes: B sequences, T tree nodes, k aux layers, H target hidden, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from trt_eagle3.decode.device_batch import DeviceBatch
from trt_eagle3.decode.draft_ahead import DraftAhead, Tail
from trt_eagle3.decode.outcome import Outcome, accept_greedy, is_chain
from trt_eagle3.decode.propose import Proposal, tree_proposal
from trt_eagle3.decode.tree import AnyTree, Tree
from trt_eagle3.engine.torch.captured_function import CapturedFunctions

__all__ = ["CycleTail", "TreeShape", "tree_shape"]

CAPTURES = False
"""Whether what follows a verify step is captured: not until that has been seen on a GPU."""

_INPUTS = ("tokens", "target_ids", "aux_hidden_states", "lengths", "positions")


class CycleTail:
    """Accepts greedy trees, extends the draft and proposes."""

    def __init__(self, draft: DraftAhead) -> None:
        self._draft = draft
        self._captured = CapturedFunctions()

    def run(
        self,
        tree: AnyTree,
        proposal: Proposal,
        target_ids: Tensor,
        aux: Tensor,
        batch: DeviceBatch,
        *,
        ahead: bool,
    ) -> Tail:
        """After the target said ``target_ids`` int64 [B, T] (``greedy_tokens``).

        Args:
            aux: [B, T, k * H] of the nodes. ahead: whether the next trees are wanted.
        """
        captures = CAPTURES and aux.is_cuda and self._draft.capturable
        if not (captures and ahead and isinstance(tree, Tree)):
            outcome = _accept(tree, proposal, target_ids)
            return self.after(tree, outcome, aux, batch, ahead=ahead)
        values = (proposal.tokens, target_ids, aux, batch.lengths, batch.positions)
        inputs = {**dict(zip(_INPUTS, values, strict=True)), **batch.state_inputs}
        found = self._captured.run(repr(tree), partial(self._named, tree), inputs)
        # copies: the next replay overwrites what sequences keep
        return Tail(
            said=found["said"],
            path=found["path"],
            logits=found["logits"].clone(),
            features=found["features"].clone(),
            prepared=tree_proposal(tree, found["tokens"].clone()),
        )

    def after(
        self, tree: AnyTree, outcome: Outcome, aux: Tensor, batch: DeviceBatch, *, ahead: bool
    ) -> Tail:
        """The same of trees that are accepted."""
        drafters = self._draft.extend(batch, outcome, aux, in_place=is_chain(tree))
        return Tail(
            said=outcome.packed(),
            path=outcome.path,
            logits=drafters.logits,
            features=drafters.features,
            prepared=self._draft.prepare(tree, drafters) if ahead else None,
        )

    def _named(self, tree: Tree, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``run`` from and to tensors by name."""
        tokens, target_ids, aux, lengths, positions = (inputs[name] for name in _INPUTS)
        states = {name: t for name, t in inputs.items() if name not in _INPUTS}
        batch = DeviceBatch(lengths, positions, roots=lengths, rows=lengths, state_inputs=states)
        outcome = _accept(tree, tree_proposal(tree, tokens), target_ids)
        tail = self.after(tree, outcome, aux, batch, ahead=True)
        assert tail.prepared is not None
        return {
            "said": tail.said,
            "path": tail.path.contiguous(),
            "logits": tail.logits,
            "features": tail.features,
            "tokens": tail.prepared.tokens,
        }


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
