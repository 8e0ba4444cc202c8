"""The drafting side of a decoder.

Shapes: B segments, S rows of each, P pages, k aux layers, H target hidden, Hd draft hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.forward.batch import segment_inputs, segment_metadata, segment_positions
from trt_eagle3.decode.forward.prompt_rows import PromptRows
from trt_eagle3.decode.forward.segment import Segment
from trt_eagle3.decode.speculation.propose import Proposer, draft_positions, put_draft_visual
from trt_eagle3.decode.step.first_token import FirstTokens

__all__ = ["Drafting"]


@dataclass(frozen=True)
class Drafting:
    """Who proposes, and what the draft is."""

    proposer: Proposer
    manifest: DraftManifest

    def extend(self, segments: Sequence[Segment], embeds: Tensor, aux: Tensor) -> None:
        """The draft's next rows, from ``aux [B, S, k * H]`` and ``embeds [B, S, Hd]`` of the
        tokens ahead.
        """
        inputs = segment_inputs(self.proposer.runner.states, segments)
        positions = segment_positions(segments, embeds.shape[1])
        self._extend(segments, positions, inputs, embeds, aux)

    def follow(
        self, rows: PromptRows, page_table: Tensor, aux: Tensor, first_tokens: FirstTokens
    ) -> None:
        """The same of a prefill's ``rows``, whose pages the target was told as ``page_table`` int32
        [B, P]: draft and target share them.

        A segment's last row has the next one's first token, and the prompt's the answer's first.
        """
        ids = first_tokens.put_ids(rows.ids[:, 1:], rows.segments)
        embeds = self.proposer.runner.embedding.lookup(ids)
        for i, s in enumerate(rows.segments):
            put_draft_visual(self.manifest, s.sequence.prompt, embeds[i], s.start)
        inputs = {"page_table": page_table}
        self._extend(rows.segments, rows.positions, inputs, embeds, aux)

    def _extend(
        self,
        segments: Sequence[Segment],
        positions: Tensor,
        state_inputs: Mapping[str, Tensor],
        embeds: Tensor,
        aux: Tensor,
    ) -> None:
        """``positions``: as of ``segment_positions``."""
        starts = torch.tensor([s.start for s in segments])
        positions = draft_positions(self.manifest, starts, positions)
        metadata = segment_metadata(segments, positions, state_inputs, embeds.device)
        found = self.proposer.extend(metadata, embeds, self.proposer.runner.fuse(aux))
        for s, state in zip(segments, found, strict=True):
            s.sequence.draft, s.sequence.draft_length = state, state.length
