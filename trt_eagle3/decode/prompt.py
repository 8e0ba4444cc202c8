"""A prompt as target and draft see it.

Shapes: P prompt rows, of which N are visual, S rows of a part, H target hidden, L deepstack levels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Prompt", "Vision"]


@dataclass(frozen=True)
class Vision:
    """What the vision tower makes of a prompt: ``embeds`` [N, H] and ``deepstack`` [L, N, H]."""

    embeds: Tensor
    deepstack: Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt of P rows.

    Attributes:
        token_ids: int64 [P]. position_ids: int32 [3, P]. visual_rows: bool [P].
        rope_delta: what a row's index lacks to its rope position after the prompt.
        encode_images: runs the vision tower; not called where all visual rows are in reused pages.
        media: what stands at the visual rows: a digest of each image or video, in order, with its
            number of rows.
    """

    token_ids: Tensor
    position_ids: Tensor
    rope_delta: int
    visual_rows: Tensor
    encode_images: Callable[[], Vision]
    media: tuple[tuple[bytes, int], ...] = ()

    @cached_property
    def vision(self) -> Vision:
        """Visual embeddings and deepstack levels."""
        return self.encode_images()

    def release_vision_embeddings(self) -> None:
        """Free what the vision tower made: once the prompt is in the cache, only who computes it
        again wants it.
        """
        vars(self).pop("vision", None)

    @property
    def visual_embeds(self) -> Tensor:
        """[N, H]."""
        return self.vision.embeds

    @property
    def deepstack(self) -> Tensor:
        """[L, N, H]."""
        return self.vision.deepstack

    def put_visual(self, embeds: Tensor, start: int) -> None:
        """Write visual embeddings over ``embeds [S, H]``, which are those of rows from ``start``
        on.
        """
        visual, before = self._visual(start, len(embeds))
        if count := int(visual.sum()):
            embeds[: len(visual)][visual] = self.vision.embeds[before : before + count].to(
                embeds.dtype
            )

    def put_deepstack(self, rows: Tensor, start: int) -> None:
        """Write deepstack levels into ``rows [L, S, H]``, which stand at rows from ``start`` on."""
        visual, before = self._visual(start, rows.shape[1])
        if count := int(visual.sum()):
            rows[:, : len(visual)][:, visual] = self.vision.deepstack[
                :, before : before + count
            ].to(rows.dtype)

    def has_visual(self, start: int, count: int) -> bool:
        """Whether visual rows are among ``count`` rows from ``start`` on."""
        return bool(self.visual_rows[start : start + count].any())

    def _visual(self, start: int, count: int) -> tuple[Tensor, int]:
        return self.visual_rows[start : start + count], int(self.visual_rows[:start].sum())

    def positions(self, start: int, stop: int) -> Tensor:
        """int32 [3, stop - start]: rope positions of rows, those after the prompt included."""
        num_prompt = self.position_ids.shape[1]
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
