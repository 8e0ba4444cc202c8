"""VisionEncoder: the images and videos of a prompt to its visual embeddings."""

from __future__ import annotations

import torch

from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.engine.memory import request_memory
from trt_eagle3.families.registry import tower_of
from trt_eagle3.multimodal import normalise

__all__ = ["VisionEncoder"]


class VisionEncoder:
    """Runs a bundle's vision tower, which is opened for the first image."""

    def __init__(self, bundle: LoadedBundle) -> None:
        self._bundle = bundle

    def encode(self, prompt: Prompt) -> Vision:
        """Visual embeddings and deepstack levels of ``prompt``, on the bundle's device.

        Raises:
            DeviceMemoryError: they need more memory than is free.
        """
        if not prompt.visuals:
            return self._nothing()
        what = f"prompt: the images of {int(prompt.visual_rows.sum())} visual tokens"
        with request_memory(what, "Send fewer or smaller images, or rebuild with smaller limits."):
            return self._run(prompt)

    def _run(self, prompt: Prompt) -> Vision:
        bundle = self._bundle
        grids = torch.tensor([visual.grid for visual in prompt.visuals], dtype=torch.int64)
        rows = tower_of(bundle.spec).inputs(bundle.spec.require_vision(), grids)
        patches = normalise(prompt.visuals, bundle.dtype, bundle.device)
        embeds, levels = bundle.vision.forward(patches, rows)
        return Vision(embeds, embeds.new_zeros(0, *embeds.shape) if levels is None else levels)

    def _nothing(self) -> Vision:
        bundle = self._bundle
        hidden = bundle.spec.hidden_size
        none = torch.zeros(0, hidden, dtype=bundle.dtype, device=bundle.device)
        return Vision(none, none.expand(bundle.spec.num_visual_levels, -1, -1))
