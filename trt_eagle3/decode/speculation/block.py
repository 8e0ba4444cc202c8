"""The block drafter: DFlash, DFlash2 and DSpark, over the graphs ``context`` and ``block``.

Row t of the draft's cache depends on the target's hidden states of token t alone:

    target rows   x0   x1   x2   x3   (x4: the root, which has no row yet)
    draft rows    c0   c1   c2   c3
    block                           x4   mask   mask   mask

A block's rows are written behind the committed ones, and overwritten later. Its tokens form a
chain. A block may be shorter than the trained one.

Shapes: B sequences of a padded batch, S rows of each, T nodes of a chain, k aux layers, H target
hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from trt_eagle3.decode.forward.batch import causal_mask_of, segment_inputs, segment_metadata
from trt_eagle3.decode.forward.block_runner import BlockRunner
from trt_eagle3.decode.forward.device_batch import DeviceBatch, spread_tokens
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import AttentionMetadata
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.sequence import DraftState, SequenceState
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.backfill import BackfillShapes
from trt_eagle3.decode.speculation.block_heads import BlockDrafts, BlockHeads
from trt_eagle3.decode.speculation.draft_filter import DraftFilter
from trt_eagle3.decode.speculation.draft_sampling import DraftSampling
from trt_eagle3.decode.speculation.drafter import Drafter, DraftOutput
from trt_eagle3.decode.speculation.proposal import Drawn, Proposal, is_chain, tree_proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.drafts.block.manifest import BlockManifest

__all__ = ["BlockDrafter"]


@dataclass(frozen=True)
class _Written:
    """The state of a sequence whose context rows are written; a block needs nothing else of it."""


_WRITTEN = _Written()


class BlockDrafter(Drafter):
    """A forward drafts a whole chain."""

    runner: BlockRunner
    manifest: BlockManifest

    def __init__(
        self,
        runner: BlockRunner,
        heads: BlockHeads,
        manifest: BlockManifest,
        **shapes: Unpack[BackfillShapes],
    ) -> None:
        """Create a drafter. ``shapes``: as for ``DraftBackfill``."""
        super().__init__(runner, manifest, **shapes)
        self.heads = heads

    def prefill(self, rows: PromptRows, next_ids: Tensor, page_table: Tensor, aux: Tensor) -> None:
        """Write rows of prompts (``Drafter.prefill``)."""
        del next_ids
        self._write(rows.segments, {"page_table": page_table}, aux)

    def _commit(self, segments: Sequence[Segment], aux: Tensor) -> None:
        """Write deferred rows (``backfill.Commit``)."""
        self._write(segments, segment_inputs(self.runner.states, segments), aux)

    def _write(
        self, segments: Sequence[Segment], state_inputs: Mapping[str, Tensor], aux: Tensor
    ) -> None:
        starts = torch.tensor([s.start for s in segments], dtype=torch.int32)
        positions = _positions(starts, aux.shape[1])
        self.runner.write(aux, segment_metadata(segments, positions, state_inputs, aux.device))
        for s in segments:
            s.sequence.draft = _WRITTEN
            s.sequence.num_draft_computed_tokens = s.stop

    def _propose_now(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        rows: DeviceBatch,
        samplers: Sequence[Sampler | None],
    ) -> Proposal:
        del sequences
        lengths, roots = rows.num_computed_tokens, rows.roots.long()
        sampling = DraftSampling.of(samplers, rows.size, lengths.device)
        allowed = self._filter_of(samplers)
        return self._draft(tree, lengths, roots, rows.pages, sampling, allowed)

    def extend(
        self,
        batch: DeviceBatch,
        proposal: Proposal,
        paths: AcceptedPaths,
        aux: Tensor,
        *,
        ahead: bool,
    ) -> DraftOutput:
        """Write accepted rows (``Drafter.extend``)."""
        counts = paths.counts.int()
        size, width = paths.path.shape
        metadata = AttentionMetadata(
            past=batch.num_computed_tokens,
            counts=counts,
            state_inputs=batch.pages,
            mask=causal_mask_of(width, aux.device).expand(size, -1, -1),
            positions=_positions(batch.num_computed_tokens, width),
        )
        self.runner.write(aux, metadata)
        if not ahead:
            return DraftOutput(None)
        lengths, roots = batch.num_computed_tokens + counts, paths.last.clamp(min=0)
        sampling = None if proposal.drawn is None else proposal.drawn.sampling
        return DraftOutput(self._draft(proposal.tree, lengths, roots, batch.pages, sampling))

    def _state_at(self, output: DraftOutput, row: int) -> DraftState:
        del output, row
        return _WRITTEN

    def dummy_proposal(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Propose for a batch of padding (``Drafter.dummy_proposal``)."""
        del dtype
        proposal = self._draft(tree, batch.num_computed_tokens, batch.roots.long(), batch.pages)
        shape, device = tuple(proposal.tokens.shape), batch.num_computed_tokens.device
        return replace(proposal, tokens=spread_tokens(shape, self.manifest.vocab_size, device))

    def _draft(
        self,
        tree: AnyTree,
        lengths: Tensor,
        roots: Tensor,
        pages: Mapping[str, Tensor],
        sampling: DraftSampling | None = None,
        allowed: DraftFilter | None = None,
    ) -> Proposal:
        """Draft a chain ``tree`` after ``lengths`` int32 [B] rows and ``roots`` int64 [B]."""
        assert isinstance(tree, Tree)
        assert is_chain(tree), "a block is a chain"
        m, size, device = self.manifest, len(roots), roots.device
        num_drafts = tree.num_nodes - 1
        width = m.rows_of(num_drafts)
        causal = causal_mask_of(width, device).expand(size, -1, -1)
        metadata = AttentionMetadata(
            past=lengths,
            counts=[width] * size,
            state_inputs=pages,
            mask=causal if m.is_causal else _whole_mask(width).expand(size, -1, -1),
            positions=_positions(lengths, width),
        )
        tokens = functional.pad(roots[:, None], (0, width - 1), value=m.mask_token_id)
        logit_rows = torch.arange(m.first_head_row, width).expand(size, -1)
        inputs = tokens, metadata, causal, logit_rows
        if allowed is None:
            then, further = self.heads.continuation(roots, lengths, sampling)
            found = BlockDrafts.of(self.runner.forward_then(*inputs, then, further))
        else:
            outputs = self.runner.forward(*inputs)
            found = self.heads.choose(outputs, roots, lengths, sampling, allowed)
        chain = tree_proposal(tree, torch.cat([roots[:, None], found.tokens], dim=1))
        return replace(chain, drawn=_drawn(found, sampling))


def _drawn(found: BlockDrafts, sampling: DraftSampling | None) -> Drawn | None:
    """Return the distributions of all nodes of the chains, the root's too."""
    if sampling is None:
        return None
    assert found.candidates is not None
    assert found.probs is not None
    ids, probs = (functional.pad(f, (0, 0, 1, 0)) for f in (found.candidates, found.probs))
    return Drawn(ids, probs, sampling)


def _positions(first: Tensor, width: int) -> Tensor:
    """Return rope positions int32 [3, B, width] from ``first`` int32 [B] on: sequence indices."""
    rows = first[:, None] + _offsets(width, first.device)
    return rows.expand(3, -1, -1)


@lru_cache(maxsize=64)
def _offsets(width: int, device: torch.device) -> Tensor:
    """Return ``0, 1, ...`` int32 [width]. It is shared: read-only."""
    return torch.arange(width, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _whole_mask(width: int) -> Tensor:
    """Return the mask of rows that all see each other, on the host. It is shared: read-only."""
    return torch.ones(width, width, dtype=torch.bool)
