"""Grow trees level by level with an autoregressive draft, whose KV is kept between levels.

Row t of the draft is (features of target row t, embedding of token t + 1):

    target rows   x0   x1   x2   x3
    draft rows    (g0, x1)  (g1, x2)  (g2, x3)  (g3, x4)

After every step the draft holds as many rows as the target. The logits of its last row give the
first proposals. Rows of proposals are drafted from the draft's own features. When their tokens are
accepted, they are overwritten from the target's features.

P-EAGLE drafts a whole chain in one forward: rows of a mask token stand where the rows of proposals
would. They have no features of their own, so all have those of a learned hidden state:

    draft rows    ... (g3, x4)  (mask, mask)  (mask, mask)

Only a grammar filter makes the host wait for the device here.

Shapes: B sequences, T tree nodes, m rows of a level, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.forward.batch import causal_mask_of
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, all_rows
from trt_eagle3.decode.speculation.draft_filter import DraftFilter
from trt_eagle3.decode.speculation.dynamic_tree import Candidates, DynamicTree, ancestors
from trt_eagle3.decode.speculation.proposal import Proposal, tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

__all__ = ["DraftInputs", "MaskRows", "TreeGrower"]


@dataclass(frozen=True)
class MaskRows:
    """The mask rows of P-EAGLE: their token, and their aux hidden states [1, 1, k * H]."""

    token_id: int
    hidden: Tensor


@dataclass(frozen=True)
class DraftInputs:
    """Inputs for growing a batch of trees, on the device.

    Attributes:
        logits: f32 [B, Vd] and features: [B, Hd] of the last committed rows.
        num_computed_tokens: int32 [B] rows that the draft holds.
        roots: int64 [B] last accepted tokens.
        positions: int32 [B] rope positions at depth 1.
        state_inputs: where the draft's states lie, with room for the tree's draft rows.
        filter: masks tokens that grammars forbid; None without a grammar.
    """

    logits: Tensor
    features: Tensor
    num_computed_tokens: Tensor
    roots: Tensor
    positions: Tensor
    state_inputs: Mapping[str, Tensor]
    filter: DraftFilter | None = None

    def first(self) -> tuple[Tensor, Tensor]:
        """Return logits f32 [B, 1, Vd] and features [B, 1, Hd] of the roots.

        Forbidden tokens are masked in the logits.
        """
        logits = self.logits[:, None]
        if self.filter is not None:
            logits = self.filter.first(logits)
        return logits, self.features[:, None]


class TreeGrower:
    """Grows static and dynamic trees."""

    def __init__(self, runner: DraftRunner, mask_rows: MaskRows | None = None) -> None:
        """Create it. ``mask_rows``: of a draft that grows chains in one forward."""
        self._runner = runner
        self._mask_rows = mask_rows

    def grow(self, tree: AnyTree, inputs: DraftInputs) -> Proposal:
        """Grow a ``tree`` from the last accepted token of each sequence."""
        if self._mask_rows is not None:
            assert isinstance(tree, Tree)
            return self._fill_at_once(tree, inputs, self._mask_rows)
        return self._fill(tree, inputs) if isinstance(tree, Tree) else self._expand(tree, inputs)

    def _fill(self, tree: Tree, inputs: DraftInputs) -> Proposal:
        """Grow a static tree: its shape fixes the parent and token rank of every node."""
        logits, features = inputs.first()
        tokens = [inputs.roots[:, None]]
        for depth, step in enumerate(tree.steps_on(logits.device)):
            best = self._runner.target_ids(_best(logits, step.width))
            tokens.append(best[:, 0] if step.is_link else best[:, step.parents, step.ranks])
            if step.mask is None:
                break
            inner, fed = tokens[-1], features
            if not step.is_link:  # a chain needs no indexing, and each index is a launch
                inner, fed = inner[:, step.inner], features[:, step.parents[step.inner]]
            mask = step.mask.expand(len(inner), -1, -1)
            logits, features = self._level(inputs, depth, inner, fed, mask, step.num_shared)
            if inputs.filter is not None:
                logits = inputs.filter.level(logits, inner, step.parents[step.inner])
        return tree_proposal(tree, torch.cat(tokens, dim=1))

    def _fill_at_once(self, tree: Tree, inputs: DraftInputs, mask: MaskRows) -> Proposal:
        """Grow a chain by one forward over mask rows (P-EAGLE)."""
        logits, _ = inputs.first()
        batch, count = len(logits), tree.num_nodes - 2
        if count:
            device = logits.device
            ids = torch.full((batch, count), mask.token_id, device=device)
            features = self._runner.fuse(mask.hidden).expand(batch, count, -1)
            rows = causal_mask_of(count, device).expand(batch, -1, -1)
            places = torch.arange(count, dtype=torch.int32, device=device)
            more, _ = self._level(inputs, places, ids, features, rows)
            logits = torch.cat([logits, more], dim=1)
        tokens, own = [inputs.roots[:, None]], torch.zeros(1, dtype=torch.int64)
        for i in range(count + 1):
            level = logits[:, i : i + 1]
            if i and inputs.filter is not None:
                level = inputs.filter.level(level, tokens[-1], own)
            tokens.append(self._runner.target_ids(level.argmax(dim=-1)))
        return tree_proposal(tree, torch.cat(tokens, dim=1))

    def _expand(self, tree: DynamicTree, inputs: DraftInputs) -> Proposal:
        """Grow a dynamic tree: each level expands the best nodes (``dynamic_tree``)."""
        logits, features = inputs.first()
        tokens, log_probs = self._children(logits, tree.topk)
        candidates = Candidates(tokens[:, 0], log_probs[:, 0])
        frontier = candidates.first()
        own = torch.eye(tree.topk, dtype=torch.bool, device=logits.device).expand(
            len(tokens), -1, -1
        )
        mask = own[..., :0]
        for depth in range(tree.depth - 1):
            rows = frontier.parents[..., None]
            fed = features.gather(1, rows.expand(-1, -1, features.shape[2]))
            above = mask.gather(1, rows.expand(-1, -1, mask.shape[2])) if depth else mask
            mask = torch.cat([above, own], dim=2)
            logits, features = self._level(inputs, depth, frontier.tokens, fed, mask)
            if inputs.filter is not None:
                logits = inputs.filter.level(logits, frontier.tokens, frontier.parents)
            frontier = candidates.add(frontier, *self._children(logits, tree.topk))
        kept, parents = candidates.keep(tree.num_nodes - 1)
        seen = ancestors(parents, tree.depth)
        tokens = torch.cat([inputs.roots[:, None], kept], dim=1)
        return Proposal(tree, tokens, parents, seen.sum(dim=2) - 1, seen)

    def _level(
        self,
        inputs: DraftInputs,
        depth: int | Tensor,
        tokens: Tensor,
        fed: Tensor,
        mask: Tensor,
        num_shared: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run ``tokens [B, m]`` at ``depth``, a number or int32 [m], from ``fed`` features.

        Returns logits f32 [B, m, Vd] and features [B, m, Hd]. ``num_shared``: rows of the tree
        before those of ``mask``.
        """
        batch, count = tokens.shape
        metadata = AttentionMetadata(
            past=inputs.num_computed_tokens + num_shared
            if num_shared
            else inputs.num_computed_tokens,
            counts=[count] * batch,
            state_inputs=inputs.state_inputs,
            mask=mask,
            positions=(inputs.positions[:, None] + depth).expand(3, batch, count),
        )
        embeds = self._runner.embedding.lookup(tokens)
        return self._runner.forward(embeds, fed, metadata, all_rows(batch, count))

    def _children(self, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Return target ids and log-probabilities [B, n, k] of each row's best tokens.

        ``logits``: [B, n, Vd].
        """
        best = logits.topk(topk, dim=-1)
        log_probs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        # if a draft overflows: NaN would sort before its own parent
        return self._runner.target_ids(best.indices), log_probs.nan_to_num(nan=-torch.inf)


def _best(logits: Tensor, width: int) -> Tensor:
    """Return the best draft ids of each row, int64 [..., width]; argmax is cheaper for one."""
    return logits.argmax(dim=-1, keepdim=True) if width == 1 else logits.topk(width, dim=-1).indices
