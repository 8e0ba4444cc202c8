"""Prompts as rows that pass through the decoder layer by layer.

Shapes: S rows of a prompt, H hidden, N visual rows, L visual levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trt_eagle3.calibration.prompts import CalibrationPrompts
from trt_eagle3.multimodal import ModelInputs

if TYPE_CHECKING:
    from trt_eagle3.parity.reference.target import Rope, TargetLayer, TargetReference

__all__ = ["CalibrationRows", "encode_prompts"]

_VISUAL_TOKENS = 4096
"""Visual tokens of the images that the tower encodes at once."""


@dataclass
class CalibrationRows:
    """The rows of a prompt.

    Attributes:
        hidden: float32 [S, H], after the layers that have run.
        rope: cos and sin.
        levels: [L, N, H], added to the visual rows.
        visual_rows: bool [S].
    """

    hidden: Tensor
    rope: Rope
    levels: Tensor
    visual_rows: Tensor

    def step(self, layer: TargetLayer) -> dict[str, Tensor]:
        """Run ``layer``; return its tensors, as ``TargetLayer.trace`` does."""
        traced = layer.trace(self.hidden, self.rope)
        self.hidden = traced[f"layers.{layer.index}.output"]
        if layer.index < len(self.levels) and bool(self.visual_rows.any()):
            self.hidden = self.hidden.clone()
            self.hidden[self.visual_rows] += self.levels[layer.index].to(self.hidden)
        return traced


def encode_prompts(
    reference: TargetReference, prompts: CalibrationPrompts
) -> list[CalibrationRows]:
    """Embed every prompt, with its images in their rows."""
    found = []
    for batch in _batches(prompts.inputs):
        counts = [int(inputs.visual_rows.sum()) for inputs in batch]
        embeds, levels = _vision(reference, batch)
        for inputs, visual, own in zip(
            batch, embeds.split(counts), levels.split(counts, dim=1), strict=True
        ):
            hidden = reference.embed(inputs.token_ids)
            rows = inputs.visual_rows.to(hidden.device)
            hidden[rows] = visual.to(hidden)
            rope = reference.rope(inputs.position_ids.long())
            found.append(CalibrationRows(hidden, rope, own, rows))
    return found


def _batches(inputs: Sequence[ModelInputs]) -> Iterator[list[ModelInputs]]:
    """Yield consecutive prompts whose images fit into one run of the tower; a large one alone."""
    batch: list[ModelInputs] = []
    room = _VISUAL_TOKENS
    for one in inputs:
        count = int(one.visual_rows.sum())
        if batch and count > room:
            yield batch
            batch, room = [], _VISUAL_TOKENS
        batch.append(one)
        room -= count
    yield batch


def _vision(reference: TargetReference, batch: Sequence[ModelInputs]) -> tuple[Tensor, Tensor]:
    """Return visual embeddings [N, H] and levels [L, N, H] of all images of ``batch``."""
    seen = [inputs for inputs in batch if len(inputs.patches)]
    if not seen:
        none = torch.zeros(0, reference.hidden_size)
        return none, none.expand(reference.num_visual_levels, -1, -1)
    patches = torch.cat([inputs.patches for inputs in seen])
    grids = torch.cat([inputs.grid_thw for inputs in seen])
    states = reference.vision(patches, grids)
    return states.visual_embeds, states.visual_levels
