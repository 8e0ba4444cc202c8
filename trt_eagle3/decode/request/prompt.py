"""Prompt: the tokens, positions and visual embeddings of a prompt.

Shapes: P prompt rows, N visual ones among them, S rows of a part, H target hidden, L deepstack
levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trt_eagle3.host_copy import to_device
from trt_eagle3.multimodal.prepared import PixelPatches

__all__ = ["Prompt", "Vision", "media_digests"]


@dataclass(frozen=True)
class Vision:
    """Output of the vision tower for a prompt: ``embeds`` [N, H], ``visual_levels`` [L, N, H]."""

    embeds: Tensor
    visual_levels: Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt of P rows.

    Attributes:
        token_ids: int64 [P]. position_ids: int32 [3, P]. visual_rows: bool [P].
        rope_delta: rope position minus row index, for rows after the prompt.
        media: digest and number of visual rows of each image or video, in order.
        visuals: the images and videos themselves, in order.
        vision: output of the vision tower where it is known beforehand; else a sequence holds it.
        client: name of the client, if known; clients share the cache of embeddings fairly.
    """

    token_ids: Tensor
    position_ids: Tensor
    rope_delta: int
    visual_rows: Tensor
    media: tuple[tuple[bytes, int], ...] = ()
    visuals: tuple[PixelPatches, ...] = ()
    vision: Vision | None = None
    client: str = ""

    def with_vision(self, vision: Vision | None) -> Prompt:
        """Return the same prompt with other visual embeddings, or without any."""
        return replace(self, vision=vision)

    @property
    def _encoded(self) -> Vision:
        assert self.vision is not None, "visual rows are read before the vision tower has run"
        return self.vision

    def put_visual(self, embeds: Tensor, start: int, vision: Vision | None = None) -> None:
        """Write visual embeddings over ``embeds`` [S, H] of the rows from ``start`` on.

        ``vision``: output of the vision tower; None: the prompt's own.
        """
        rows, first = self._visual(start, len(embeds))
        if len(rows):
            known = (vision or self._encoded).embeds
            found = known[first : first + len(rows)].to(embeds.dtype)
            embeds.index_copy_(0, to_device(rows, embeds.device), found)

    def put_visual_levels(self, rows: Tensor, start: int, vision: Vision | None = None) -> None:
        """Write deepstack levels into ``rows`` [L, S, H] of the rows from ``start`` on.

        ``vision``: as for ``put_visual``.
        """
        visual, first = self._visual(start, rows.shape[1])
        if len(visual):
            known = (vision or self._encoded).visual_levels
            found = known[:, first : first + len(visual)].to(rows.dtype)
            rows.index_copy_(1, to_device(visual, rows.device), found)

    def has_visual(self, start: int, count: int) -> bool:
        """Return whether any of ``count`` rows from ``start`` on is visual."""
        return bool(self.visual_rows[start : start + count].any())

    def _visual(self, start: int, count: int) -> tuple[Tensor, int]:
        """Return the visual rows among ``count`` rows from ``start`` on, and how many are before.

        Rows are int64, relative to ``start``.
        """
        rows = self.visual_rows[start : start + count].nonzero().flatten()
        return rows, int(self.visual_rows[:start].sum())

    def positions(self, start: int, stop: int) -> Tensor:
        """Return rope positions of rows, also after the prompt, int32 [3, stop - start]."""
        num_prompt = self.position_ids.shape[1]
        if stop <= num_prompt:
            return self.position_ids[:, start:stop]
        first, last = (
            max(start, num_prompt) + self.rope_delta,
            max(stop, num_prompt) + self.rope_delta,
        )
        after = torch.arange(first, last, dtype=torch.int32).expand(3, -1)
        return (
            after
            if start >= num_prompt
            else torch.cat([self.position_ids[:, start:stop], after], dim=1)
        )


def media_digests(visuals: Sequence[PixelPatches], merged: int) -> tuple[tuple[bytes, int], ...]:
    """Return the digest of each image or video in order, and its number of rows in the prompt.

    ``merged``: patches per row.
    """
    return tuple((visual.digest, len(visual.pixels) // merged) for visual in visuals)
