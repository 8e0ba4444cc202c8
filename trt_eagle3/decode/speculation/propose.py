"""Proposing: the draft grows trees from the last accepted tokens, its own KV kept between levels.

Row t of the draft is (features of target row t, embedding of token t + 1), at the rope position of
    row t: target rows   x0   x1   x2   x3          draft rows   (g0, x1)  (g1, x2)  (g2, x3)  (g3,
    x4)
so after every cycle the draft holds exactly as many rows as the target, and its last row's logits
are the first proposals. Rows of proposals are drafted from the draft's own features, and
overwritten by true ones on ``extend``.

Shapes: B sequences, S rows of each, T tree nodes, Hd draft hidden, Vd draft vocab. Nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, all_rows
from trt_eagle3.decode.memory.sequence import DraftState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.draft_filter import DraftFilter, filtered_states
from trt_eagle3.decode.speculation.dynamic_tree import Candidates, DynamicTree, ancestors
from trt_eagle3.decode.speculation.tree import Tree

_Count = TypeVar("_Count", int, Tensor)

__all__ = [
    "AnyDrafters",
    "DeviceDrafters",
    "Drafters",
    "Proposal",
    "Proposer",
    "draft_decode_position",
    "draft_positions",
    "put_draft_visual",
    "tree_proposal",
]


@dataclass(frozen=True)
class Drafters:
    """Sequences that propose together.

    Attributes:
        states: [B]. roots: [B] last accepted tokens.
        positions: [B] rope positions at depth 1.
        state_inputs: where the draft's states lie, with room for the tree's draft rows.
        filter: what their grammars allow; None where there are none.
    """

    states: Sequence[DraftState]
    roots: Sequence[int]
    positions: Sequence[int]
    state_inputs: Mapping[str, Tensor]
    filter: DraftFilter | None = None

    @cached_property
    def first_positions(self) -> Tensor:
        """``positions`` as int32 [B, 1]."""
        return torch.tensor(self.positions, dtype=torch.int32)[:, None]

    @property
    def root_ids(self) -> Tensor:
        """``roots`` as int64 [B, 1]."""
        return torch.tensor(self.roots)[:, None]

    def past(self, num_shared: int) -> Sequence[int]:
        """[B] rows before those of a level, ``num_shared`` of the tree's among them."""
        return [state.length + num_shared for state in self.states]

    def first(self) -> tuple[Tensor, Tensor]:
        """Logits f32 [B, 1, Vd] and features [B, 1, Hd] of the last committed rows."""
        logits, features = DraftState.gather(self.states)
        return logits[:, None], features[:, None]


@dataclass(frozen=True)
class DeviceDrafters:
    """``Drafters`` of which the host does not know yet what they have said.

    Attributes:
        logits: f32 [B, Vd] and features: [B, Hd] of their last committed rows.
        lengths: int32 [B] rows that the draft holds. roots: int64 [B].
        positions: int32 [B] rope positions at depth 1. state_inputs, filter: as of ``Drafters``.
    """

    logits: Tensor
    features: Tensor
    lengths: Tensor
    roots: Tensor
    positions: Tensor
    state_inputs: Mapping[str, Tensor]
    filter: DraftFilter | None = None

    @property
    def first_positions(self) -> Tensor:
        """``positions`` as [B, 1]."""
        return self.positions[:, None]

    @property
    def root_ids(self) -> Tensor:
        """``roots`` as [B, 1]."""
        return self.roots[:, None]

    def past(self, num_shared: int) -> Tensor:
        """int32 [B] rows before those of a level, ``num_shared`` of the tree's among them."""
        return self.lengths + num_shared if num_shared else self.lengths

    def first(self) -> tuple[Tensor, Tensor]:
        """Logits f32 [B, 1, Vd] and features [B, 1, Hd] of the last committed rows."""
        return self.logits[:, None], self.features[:, None]


AnyDrafters = Drafters | DeviceDrafters


@dataclass(frozen=True)
class Proposal:
    """Trees of one shape, their nodes' parents first.

    Attributes:
        tokens: int64 [B, T], the roots first. parents: int64 [B, T], the roots' -1.
        depths: int64 [B, T]. mask: bool [B, T, T]: row i is true at i and its ancestors.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor


def draft_positions(manifest: DraftManifest, first_rows: Tensor, positions: Tensor) -> Tensor:
    """Rope positions int32 [3, B, S] of draft rows from ``first_rows`` [B] on.

    ``positions`` int32 [3, B, S + 1]: the target's of those rows and of the row after them, where a
    draft stands whose positions are shifted.
    """
    if manifest.positions == "linear":
        count = torch.arange(positions.shape[2] - 1, dtype=torch.int32)
        rows = first_rows[:, None].int() + manifest.position_shift + count
        return rows.expand(3, -1, -1)
    found = positions[..., 1:] if manifest.position_shift else positions[..., :-1]
    return found[:1].expand(3, -1, -1) if manifest.positions == "temporal" else found


def draft_decode_position(manifest: DraftManifest, length: _Count, position: _Count) -> _Count:
    """Rope position of the draft row after ``length`` rows, whose target row stands at rope
    ``position``; of several sequences where they are tensors.
    """
    return (length if manifest.positions == "linear" else position) + manifest.position_shift


def put_draft_visual(manifest: DraftManifest, prompt: Prompt, embeds: Tensor, start: int) -> None:
    """Write what stands at image positions over ``embeds [S, Hd]`` of draft rows from ``start`` on.

    Row t has the text embedding of token t + 1, and with it the visual one where the draft has
    those at all.
    """
    if manifest.image_rows == "vision":
        prompt.put_visual(embeds, start + int(manifest.image_rows_rotated))


class Proposer:
    """Grows proposals over the draft's cache."""

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner

    def filter_of(self, samplers: Sequence[Sampler | None]) -> DraftFilter | None:
        """What keeps proposals of ``samplers``, by row, to their grammars; None where that does not
        pay.
        """
        states = filtered_states(samplers)
        return DraftFilter(states, self.runner.target_ids) if DraftFilter.pays(states) else None

    def extend(
        self, metadata: AttentionMetadata, embeds: Tensor, features: Tensor
    ) -> list[DraftState]:
        """Commit rows with true features; each sequence's last one seeds its next proposals.

        Args:
            metadata: ``is_prompt``. embeds: [B, S, Hd] of the tokens one ahead.
            features: [B, S, Hd] from ``fuse``.
        """
        assert metadata.is_prompt, "runs of rows, each of which sees those before it"
        assert not isinstance(metadata.past, Tensor)
        assert not isinstance(metadata.counts, Tensor)
        last = torch.tensor(metadata.counts)[:, None] - 1
        logits, out = self.runner.forward(embeds, features, metadata, last)
        # copies: the next run of the same shapes may overwrite a session's outputs
        kept, held = logits[:, 0].clone(), out[:, 0].clone()
        return [
            DraftState(past + count, kept, held, i)
            for i, (past, count) in enumerate(zip(metadata.past, metadata.counts, strict=True))
        ]

    def propose(self, tree: Tree | DynamicTree, drafters: AnyDrafters) -> Proposal:
        """Trees from each sequence's last accepted token."""
        return self._fill(tree, drafters) if isinstance(tree, Tree) else self._grow(tree, drafters)

    def _fill(self, tree: Tree, drafters: AnyDrafters) -> Proposal:
        """A static tree: its shape says which token of which parent every node takes."""
        logits, features = _first(drafters)
        tokens = [drafters.root_ids.to(logits.device, non_blocking=True)]
        for depth, step in enumerate(tree.steps_on(logits.device)):
            best = self.runner.target_ids(_best(logits, step.width))
            tokens.append(best[:, 0] if step.is_link else best[:, step.parents, step.ranks])
            if step.mask is None:
                break
            inner, fed = tokens[-1], features
            if not step.is_link:  # each index is a launch, and a chain's steps are short
                inner, fed = inner[:, step.inner], features[:, step.parents[step.inner]]
            mask = step.mask.expand(len(inner), -1, -1)
            logits, features = self._level(
                drafters, depth, inner, fed, mask, num_shared=step.num_shared
            )
            if drafters.filter is not None:
                logits = drafters.filter.level(logits, inner, step.parents[step.inner])
        return tree_proposal(tree, torch.cat(tokens, dim=1))

    def _grow(self, tree: DynamicTree, drafters: AnyDrafters) -> Proposal:
        """A dynamic tree (``dynamic_tree``): each level feeds the children that score best."""
        logits, features = _first(drafters)
        tokens, log_probs = self._children(logits, tree.topk)
        candidates = Candidates(tokens[:, 0], log_probs[:, 0])
        frontier = candidates.first()
        own = torch.eye(tree.topk, dtype=torch.bool, device=logits.device).expand(
            len(tokens), -1, -1
        )
        mask = own[..., :0]
        for depth in range(tree.steps - 1):
            rows = frontier.parents[..., None]
            fed = features.gather(1, rows.expand(-1, -1, features.shape[2]))
            above = mask.gather(1, rows.expand(-1, -1, mask.shape[2])) if depth else mask
            mask = torch.cat([above, own], dim=2)
            logits, features = self._level(drafters, depth, frontier.tokens, fed, mask)
            if drafters.filter is not None:
                logits = drafters.filter.level(logits, frontier.tokens, frontier.parents)
            frontier = candidates.add(frontier, *self._children(logits, tree.topk))
        kept, parents = candidates.keep(tree.num_nodes - 1)
        seen = ancestors(parents, tree.steps)
        roots = drafters.root_ids.to(kept.device, non_blocking=True)
        tokens = torch.cat([roots, kept], dim=1)
        return Proposal(tokens, parents, seen.sum(dim=2) - 1, seen)

    def _level(
        self,
        drafters: AnyDrafters,
        depth: int,
        tokens: Tensor,
        fed: Tensor,
        mask: Tensor,
        num_shared: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Run ``tokens [B, m]`` at ``depth`` from ``fed`` features; logits f32 [B, m, Vd] and
        features [B, m, Hd].
        """
        batch, count = tokens.shape
        positions = drafters.first_positions + depth
        metadata = AttentionMetadata(
            past=drafters.past(num_shared),
            counts=[count] * batch,
            state_inputs=drafters.state_inputs,
            mask=mask,
            positions=positions.expand(3, batch, count),
        )
        return self.runner.forward(
            self.runner.embedding.lookup(tokens), fed, metadata, all_rows(batch, count)
        )

    def _children(self, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Target ids and log-probabilities [B, n, k] of the best tokens after each row of
        ``logits [B, n, Vd]``.
        """
        best = logits.topk(topk, dim=-1)
        log_probs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        # of a draft that overflowed: NaN would sort before its own parent
        return self.runner.target_ids(best.indices), log_probs.nan_to_num(nan=-torch.inf)


def _first(drafters: AnyDrafters) -> tuple[Tensor, Tensor]:
    """Logits f32 [B, 1, Vd] and features [B, 1, Hd] of the roots, what is forbidden left out."""
    logits, features = drafters.first()
    return logits if drafters.filter is None else drafters.filter.first(logits), features


def tree_proposal(tree: Tree, tokens: Tensor) -> Proposal:
    """The proposal of a static tree whose nodes have ``tokens`` int64 [B, T]."""
    batch = len(tokens)
    parents = torch.tensor(tree.parents).expand(batch, -1)
    return Proposal(tokens, parents, tree.depths.expand(batch, -1), tree.mask.expand(batch, -1, -1))


def _best(logits: Tensor, width: int) -> Tensor:
    """int64 [..., width]: the best draft ids of each row; one of them is cheaper found by
    argmax.
    """
    return logits.argmax(dim=-1, keepdim=True) if width == 1 else logits.topk(width, dim=-1).indices
