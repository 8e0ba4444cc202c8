"""EagleDrafter: EAGLE-3 and MTP drafts, over the graphs ``fuse`` and ``draft``.

Shapes: B sequences of a padded batch, S rows of each, T tree nodes, D nodes of the deepest path, k
aux layers, H target hidden, Hd draft hidden, Vd draft vocab, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import AutoregressiveManifest
from trt_eagle3.decode.forward.batch import (
    causal_mask_of,
    padded,
    segment_inputs,
    segment_metadata,
    segment_positions,
)
from trt_eagle3.decode.forward.device_batch import DeviceBatch, spread_tokens
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.memory.sequence import DraftState, SequenceState
from trt_eagle3.decode.memory.tensor_row import TensorRow, gather_rows
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.speculation.accept import AcceptedPaths
from trt_eagle3.decode.speculation.backfill import BackfillShapes
from trt_eagle3.decode.speculation.drafter import Drafter, DraftOutput
from trt_eagle3.decode.speculation.grow import DraftInputs, MaskRows, TreeGrower
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree

__all__ = [
    "EagleDrafter",
    "LastRow",
    "draft_decode_position",
    "draft_positions",
    "put_draft_visual",
]

_Count = TypeVar("_Count", int, Tensor)


@dataclass(frozen=True)
class _Output(DraftOutput):
    """``logits``: f32 [B, Vd] and ``features``: [B, Hd] of the last rows, on the device."""

    logits: Tensor
    features: Tensor


@dataclass(frozen=True)
class LastRow:
    """The draft's output at a sequence's last row, in tensors that several sequences share.

    Attributes:
        all_logits: f32 [B, Vd] of the last rows. all_features: [B, Hd] of the same rows.
        row: this sequence's row in both.
    """

    all_logits: Tensor
    all_features: Tensor
    row: int

    @property
    def logits(self) -> Tensor:
        """Logits f32 [Vd]."""
        return self.all_logits[self.row]

    @property
    def features(self) -> Tensor:
        """Features [Hd]."""
        return self.all_features[self.row]

    @staticmethod
    def gather(last: Sequence[LastRow]) -> tuple[Tensor, Tensor]:
        """Gather logits f32 [B, Vd] and features [B, Hd] of ``last``."""
        logits = gather_rows([TensorRow(s.all_logits, s.row) for s in last])
        return logits, gather_rows([TensorRow(s.all_features, s.row) for s in last])


class EagleDrafter(Drafter):
    """Each level of a tree takes one forward of the draft."""

    runner: DraftRunner
    manifest: AutoregressiveManifest

    def __init__(
        self,
        runner: DraftRunner,
        manifest: AutoregressiveManifest,
        mask_rows: MaskRows | None = None,
        **shapes: Unpack[BackfillShapes],
    ) -> None:
        """Create a drafter. ``mask_rows``: of P-EAGLE. ``shapes``: as for ``DraftBackfill``."""
        super().__init__(runner, manifest, **shapes)
        self._grower = TreeGrower(runner, mask_rows)

    def prefill(self, rows: PromptRows, next_ids: Tensor, page_table: Tensor, aux: Tensor) -> None:
        """Run over rows of prompts (``Drafter.prefill``)."""
        embeds = self.runner.embedding.lookup(next_ids)
        for i, s in enumerate(rows.segments):
            prompt, vision = s.sequence.prompt, s.sequence.vision
            put_draft_visual(self.manifest, prompt, embeds[i], s.start, vision)
        self._commit_at(rows.segments, rows.positions, {"page_table": page_table}, embeds, aux)

    def _commit(self, segments: Sequence[Segment], aux: Tensor) -> None:
        """Run over deferred rows (``backfill.Commit``)."""
        next_ids = [s.sequence.ids(s.start + 1, s.stop + 1) for s in segments]
        embeds = self.runner.embedding.lookup(padded(next_ids, aux.shape[1]))
        inputs = segment_inputs(self.runner.states, segments)
        positions = segment_positions(segments, embeds.shape[1])
        self._commit_at(segments, positions, inputs, embeds, aux)

    def _commit_at(
        self,
        segments: Sequence[Segment],
        positions: Tensor,
        state_inputs: Mapping[str, Tensor],
        embeds: Tensor,
        aux: Tensor,
    ) -> None:
        """Write rows with the target's features.

        The next proposals start from each sequence's last row. ``positions``: as from
        ``segment_positions``.
        """
        starts = torch.tensor([s.start for s in segments])
        positions = draft_positions(self.manifest, starts, positions)
        metadata = segment_metadata(segments, positions, state_inputs, embeds.device)
        last = torch.tensor([[s.count - 1] for s in segments])
        logits, out = self.runner.forward(embeds, self.runner.fuse(aux), metadata, last)
        # copies: the next run of the same shapes may overwrite a session's outputs
        kept, held = logits[:, 0].clone(), out[:, 0].clone()
        for i, s in enumerate(segments):
            s.sequence.draft = LastRow(kept, held, i)
            s.sequence.num_draft_computed_tokens = s.stop

    def _propose_now(
        self,
        sequences: Sequence[SequenceState],
        tree: AnyTree,
        rows: DeviceBatch,
        samplers: Sequence[Sampler | None],
    ) -> Proposal:
        last = [_last_row(s) for s in sequences]
        filler = next(row for row in last if row)  # of rows that are masked or dropped
        states = [row or filler for row in last] + [filler] * (rows.size - len(last))
        return self._grow(tree, rows, *LastRow.gather(states), samplers)

    def extend(
        self,
        batch: DeviceBatch,
        proposal: Proposal,
        paths: AcceptedPaths,
        aux: Tensor,
        *,
        ahead: bool,
    ) -> _Output:
        """Run over accepted rows with the target's features (``Drafter.extend``)."""
        if not proposal.is_chain:  # the accepted nodes of a chain are always the first ones
            aux = aux.gather(1, paths.path[..., None].expand(-1, -1, aux.shape[2]))
        size, width = paths.path.shape
        nodes = _nodes(width, aux.device)
        first = draft_decode_position(self.manifest, batch.num_computed_tokens, batch.positions)
        counts = paths.counts.int()
        metadata = AttentionMetadata(
            past=batch.num_computed_tokens,
            counts=counts,
            state_inputs=batch.pages,
            mask=causal_mask_of(width, aux.device).expand(size, -1, -1),
            positions=(first[:, None] + nodes).expand(3, -1, -1),
        )
        end = paths.counts[:, None] - 1
        embeds = self.runner.embedding.lookup(paths.tokens.clamp(min=0))
        logits, out = self.runner.forward(embeds, self.runner.fuse(aux), metadata, end)
        inputs = DraftInputs(
            logits=logits[:, 0].clone(),  # the next run may overwrite a session's outputs
            features=out.gather(1, end[..., None].expand(-1, -1, out.shape[2]))[:, 0],
            num_computed_tokens=batch.num_computed_tokens + counts,
            roots=paths.last.clamp(min=0),
            positions=first + counts,
            state_inputs=batch.pages,
        )
        following = self._grower.grow(proposal.tree, inputs) if ahead else None
        return _Output(following, inputs.logits, inputs.features)

    def _state_at(self, output: DraftOutput, row: int) -> DraftState:
        assert isinstance(output, _Output)
        return LastRow(output.logits, output.features, row)

    def dummy_proposal(self, tree: AnyTree, batch: DeviceBatch, dtype: torch.dtype) -> Proposal:
        """Propose trees for a batch of padding (``Drafter.dummy_proposal``)."""
        m, device = self.manifest, batch.num_computed_tokens.device
        logits = torch.zeros(batch.size, m.draft_vocab_size, device=device)
        features = torch.zeros(batch.size, m.hidden_size, dtype=dtype, device=device)
        proposal = self._grow(tree, batch, logits, features)
        tokens = spread_tokens(tuple(proposal.tokens.shape), m.vocab_size, device)
        return replace(proposal, tokens=tokens)

    def _grow(
        self,
        tree: AnyTree,
        batch: DeviceBatch,
        logits: Tensor,
        features: Tensor,
        samplers: Sequence[Sampler | None] = (),
    ) -> Proposal:
        """Grow trees. ``samplers``: by row, None if the row does not speculate."""
        inputs = DraftInputs(
            logits=logits,
            features=features,
            num_computed_tokens=batch.num_computed_tokens,
            roots=batch.roots.long(),
            positions=draft_decode_position(
                self.manifest, batch.num_computed_tokens, batch.positions
            ),
            state_inputs=batch.pages,
            filter=self._filter_of(samplers),
        )
        return self._grower.grow(tree, inputs)


def draft_positions(
    manifest: AutoregressiveManifest, first_rows: Tensor, positions: Tensor
) -> Tensor:
    """Return rope positions int32 [3, B, S] of draft rows from ``first_rows`` [B] on.

    ``positions`` int32 [3, B, S + 1]: the target's positions of those rows and of the row after
    them. A draft with shifted positions uses the latter.
    """
    if manifest.positions == "linear":
        count = torch.arange(positions.shape[2] - 1, dtype=torch.int32)
        rows = first_rows[:, None].int() + manifest.position_shift + count
        return rows.expand(3, -1, -1)
    found = positions[..., 1:] if manifest.position_shift else positions[..., :-1]
    return found[:1].expand(3, -1, -1) if manifest.positions == "temporal" else found


def draft_decode_position(
    manifest: AutoregressiveManifest, num_computed_tokens: _Count, position: _Count
) -> _Count:
    """Return the rope position of the draft row after ``num_computed_tokens`` rows.

    ``position``: the rope position of the same target row. Tensors hold several sequences.
    """
    base = num_computed_tokens if manifest.positions == "linear" else position
    return base + manifest.position_shift


def put_draft_visual(
    manifest: AutoregressiveManifest,
    prompt: Prompt,
    embeds: Tensor,
    start: int,
    vision: Vision | None = None,
) -> None:
    """Write visual embeddings over ``embeds [S, Hd]`` of draft rows from ``start`` on.

    Row t has the embedding of token t + 1. Nothing is written if the draft takes no visual
    embeddings. ``vision``: as for ``Prompt.put_visual``.
    """
    if manifest.image_rows == "vision":
        prompt.put_visual(embeds, start + int(manifest.image_rows_rotated), vision)


@lru_cache(maxsize=32)
def _nodes(width: int, device: torch.device) -> Tensor:
    """int32 [width]: 0, 1, ... Read-only."""
    return torch.arange(width, dtype=torch.int32, device=device)


def _last_row(sequence: SequenceState) -> LastRow | None:
    assert sequence.draft is None or isinstance(sequence.draft, LastRow)
    return sequence.draft
