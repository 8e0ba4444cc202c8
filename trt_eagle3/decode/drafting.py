"""The drafting side of a decoder.

Shapes: B segments, S rows of each, k aux layers, H target hidden, Hd draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.batch import segment_metadata
from trt_eagle3.decode.propose import Proposer, draft_positions
from trt_eagle3.decode.segment import Segment

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
        positions = []
        for s in segments:
            of_target = s.sequence.prompt.positions(s.start, s.stop + 1)
            positions.append(
                draft_positions(self.manifest, s.start, of_target[:, :-1], of_target[:, -1])
            )
        states = self.proposer.runner.states
        metadata = segment_metadata(states, segments, positions, embeds)
        found = self.proposer.extend(metadata, embeds, self.proposer.runner.fuse(aux))
        for s, state in zip(segments, found, strict=True):
            s.sequence.draft, s.sequence.draft_length = state, state.length
