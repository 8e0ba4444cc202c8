"""Proposing: the draft grows a tree from the last accepted token, its own KV kept between levels.

Row t of the draft is (features of target row t, embedding of token t + 1), at the rope position of row t:
    target rows   x0   x1   x2   x3          draft rows   (g0, x1)  (g1, x2)  (g2, x3)  (g3, x4)
so after every cycle the draft holds exactly as many rows as the target, and its last row's logits are the first
proposals. Rows of proposals are drafted from the draft's own features, and overwritten by true ones on ``extend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.kv_cache import PageTable
from trt_eagle3.decode.runner import DraftRunner, Place, causal_mask
from trt_eagle3.decode.tree import Tree

__all__ = ["DraftState", "Proposer", "draft_decode_position", "draft_positions", "draft_prompt_embeds"]


@dataclass(frozen=True)
class DraftState:
    """What the draft knows after its last committed row.

    Attributes:
        length: committed rows, equal to the target's.
        logits: f32 [Vd] of the last row. features: [Hd] of the last row.
    """

    length: int
    logits: Tensor
    features: Tensor


def draft_positions(manifest: DraftManifest, first_row: int, positions: Tensor, following: Tensor) -> Tensor:
    """Rope positions int32 [3, S] of draft rows from ``first_row`` on.

    Args:
        positions: int32 [3, S]: the target's positions of those rows.
        following: int32 [3]: the target's position of the row after them, used by a draft whose positions are shifted.
    """
    if manifest.positions == "linear":
        rows = torch.arange(positions.shape[1], dtype=torch.int32) + first_row + manifest.position_shift
        return rows.expand(3, -1)
    if manifest.position_shift:
        positions = torch.cat([positions[:, 1:], following[:, None]], dim=1)
    return positions[:1].expand(3, -1) if manifest.positions == "temporal" else positions


def draft_decode_position(manifest: DraftManifest, length: int, position: int) -> int:
    """Rope position of the draft row after ``length`` rows, whose target row stands at rope ``position``."""
    return (length if manifest.positions == "linear" else position) + manifest.position_shift


def draft_prompt_embeds(manifest: DraftManifest, embeds: Tensor, visual_embeds: Tensor, visual_rows: Tensor) -> Tensor:
    """What stands at image positions in the draft's prompt rows.

    Args:
        embeds: [P, Hd] text embeddings of tokens 1..P (row t has token t + 1).
        visual_embeds: [N, H]; visual_rows: bool [P], the target rows that hold them.
    """
    if manifest.image_rows == "pad" or not len(visual_embeds):
        return embeds
    rows = visual_rows.nonzero().flatten() - int(manifest.image_rows_rotated)
    embeds = embeds.clone()
    embeds[rows[rows >= 0]] = visual_embeds[rows >= 0].to(embeds.dtype)
    return embeds


class Proposer:
    """Grows proposals over one sequence's draft cache."""

    def __init__(self, runner: DraftRunner, prefill_chunk: int) -> None:
        self.runner = runner
        self._chunk = prefill_chunk

    def extend(self, length: int, pages: PageTable, embeds: Tensor, features: Tensor, positions: Tensor) -> DraftState:
        """Commit rows with true features after ``length`` rows; the last one's outcome seeds the next proposals.

        Args:
            embeds: [S, Hd] of the tokens one ahead. features: [S, Hd] from ``fuse``. positions: int32 [3, S].
        """
        num_rows = embeds.shape[0]
        for start in range(0, num_rows, self._chunk):
            stop = min(start + self._chunk, num_rows)
            place = Place(
                length + start, pages.pages(length + stop), causal_mask(stop - start), positions[:, start:stop]
            )
            last = torch.tensor([stop - start - 1])
            logits, out = self.runner.forward(embeds[start:stop], features[start:stop], place, last)
        return DraftState(length + num_rows, logits[0], out[-1])

    def propose(self, tree: Tree, root_token: int, state: DraftState, pages: PageTable, first_position: int) -> Tensor:
        """Tokens of the tree's nodes, int64 [T], the root's first; nothing of it waits for the device.

        Args:
            first_position: rope position at depth 1.
        """
        device = state.logits.device
        tokens = [torch.tensor([root_token]).to(device, non_blocking=True)]
        logits, features = state.logits[None], state.features[None]
        num_drafted = 0
        for depth, step in enumerate(tree.steps_on(device)):
            best = self.runner.target_ids(_best(logits, step.width))
            tokens.append(best[step.parents, step.ranks])
            if step.mask is None:
                break
            num_inner = len(step.inner)
            num_drafted += num_inner
            place = Place(
                past=state.length,
                pages=pages.pages(state.length + num_drafted),
                mask=step.mask,
                positions=torch.full((3, num_inner), first_position + depth, dtype=torch.int32),
            )
            embeds = self.runner.embedding.lookup(tokens[-1][step.inner])
            fed = features[step.parents[step.inner]]
            logits, features = self.runner.forward(embeds, fed, place, torch.arange(num_inner))
        return torch.cat(tokens)


def _best(logits: Tensor, width: int) -> Tensor:
    """int64 [n, width]: the best draft ids of each row; one of them is cheaper found by argmax."""
    return logits.argmax(dim=-1, keepdim=True) if width == 1 else logits.topk(width, dim=-1).indices
