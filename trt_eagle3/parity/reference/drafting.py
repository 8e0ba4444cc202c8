"""The draft's reference: the draft of a checkpoint with its tables, and counts of acceptance.

Shapes: n rows of a sequence, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import (
    AutoregressiveManifest,
    DraftManifest,
    autoregressive,
)
from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.reference.draft import ReferenceDraft
from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["Acceptance", "AcceptanceCounts", "AutoregressiveReference", "DraftReference", "MaskRow"]


@dataclass
class AcceptanceCounts:
    """Cycles by position: how often it was reached, and accepted by the engine and the reference.

    Attributes:
        reached: cycles with a node there.
        engine, reference: cycles that accept there.
        lengths: tokens that a verify forward emitted -> forwards.
    """

    reached: list[int] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, depth: int, engine: int, reference: int, room: int | None = None) -> None:
        """Add one cycle whose tree is ``depth`` deep; accepted lengths exclude the bonus token.

        Args:
            room: tokens until the answer ends, the end token included. Tokens after the end do not
                count, so a cycle without room is left out. None: the answer goes on.
        """
        room = depth + 1 if room is None else room
        if room <= 0:
            return
        depth = min(depth, room)
        for counts in (self.reached, self.engine, self.reference):
            counts += [0] * (depth - len(counts))
        for position in range(depth):
            self.reached[position] += 1
            self.engine[position] += engine > position
            self.reference[position] += reference > position
        self.lengths[min(engine + 1, room)] += 1


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of all recorded cycles, and of those that requests like the prompts would see.

    Attributes:
        recorded: all cycles. Answers go on past their end tokens.
        served: cycles up to the end token, of the user's own prompts; of all prompts if there are
            none.
    """

    recorded: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    served: AcceptanceCounts = field(default_factory=AcceptanceCounts)


@dataclass(frozen=True)
class DraftReference:
    """The draft of a checkpoint with its tables, of any kind."""

    draft: ReferenceDraft | BlockReference
    target: TargetReference
    speculation: SpeculationConfig

    @property
    def manifest(self) -> DraftManifest:
        """The manifest, read again from the checkpoint."""
        return self.draft.manifest

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, Hd] on the CPU: embeddings from the draft's own table or the target's."""
        if self.manifest.embedding == "target":
            return self.target.embed(token_ids).cpu().to(dtype)
        return read_tensor(self.manifest.tensors["embed_tokens.weight"])[token_ids].to(dtype)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """int64: target ids of draft ids."""
        d2t = self.draft.weights.get("d2t")
        return draft_ids if d2t is None else draft_ids + d2t[draft_ids]


@dataclass(frozen=True)
class MaskRow:
    """The inputs of every mask row: those of P-EAGLE's rows of proposals.

    ``embeds``: [Hd], of the mask token. ``aux``: [k * H]. ``features``: [Hd], made from ``aux``.
    """

    embeds: Tensor
    aux: Tensor
    features: Tensor


@dataclass(frozen=True)
class AutoregressiveReference(DraftReference):
    """A draft that predicts one token per step, or by mask rows."""

    draft: ReferenceDraft

    @cached_property
    def mask_row(self) -> MaskRow | None:
        """The mask row; None if the draft feeds back its own features."""
        rows = self.manifest.mask_rows
        if rows is None:
            return None
        aux = self.draft.weights["mask_hidden"].flatten()[None]
        embeds = self.embed(torch.tensor([rows.mask_token_id]), self.draft.dtype)
        return MaskRow(embeds[0].to(aux.device), aux[0], self.draft.fuse(aux)[0])

    @property
    def manifest(self) -> AutoregressiveManifest:
        """The manifest, read again from the checkpoint."""
        return autoregressive(self.draft.manifest)

    def prompt_embeds(self, answer: RecordedAnswer, dtype: torch.dtype) -> Tensor:
        """[P + A - 1, Hd]: row t has token t + 1, or the manifest's choice at image rows."""
        m, embeds = self.manifest, self.embed(answer.token_ids[1:], dtype)
        if m.image_rows == "vision" and answer.vision is not None:
            visual = answer.vision.outputs["visual_embeds"].to(dtype)
            for image, row in enumerate(answer.visual_rows.nonzero().flatten().tolist()):
                place = row - 1 if m.image_rows_rotated else row
                if place >= 0:
                    embeds[place] = visual[image]
        return embeds

    def positions(self, rows: Tensor, target_positions: Tensor) -> Tensor:
        """[m, 3]: positions of draft ``rows``.

        ``target_positions`` [n + 1, 3] end with text. Rows past them are text too.
        """
        m = self.manifest
        delta = int(target_positions[-1, 0]) - (len(target_positions) - 1)
        wanted = rows + m.position_shift
        if m.positions == "linear":
            return wanted[:, None].expand(-1, 3)
        known = len(target_positions)
        late = (wanted + delta)[:, None].expand(-1, 3)
        places = torch.where(
            (wanted < known)[:, None], target_positions[wanted.clamp(max=known - 1)], late
        )
        return places[:, :1].expand(-1, 3) if m.positions == "temporal" else places

    @property
    def width(self) -> int:
        """Number of best tokens of a node that a tree may take."""
        config = self.speculation
        if config.tree is not None:
            return 1 + max(rank for path in config.tree for rank in path)
        return 1 if config.mode == "chain" else config.topk
