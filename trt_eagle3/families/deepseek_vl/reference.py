"""DeepSeek-VL as ``transformers`` computes it; its parts are loaded and released one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_vl import modeling_deepseek_vl as hf

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.families.llama.reference import DENSE
from trt_eagle3.parity.ops import full_float32
from trt_eagle3.parity.reference.target import TargetReference, VisionStates
from trt_eagle3.parity.reference.tower import Place, keep_tensors, stream_parts

__all__ = ["DeepseekVLReference", "pixels_from_patches"]


class DeepseekVLReference(TargetReference):
    """A DeepSeek-VL target. ``tensors``: canonical name -> place (``TargetCheckpoint``)."""

    num_visual_levels = 0
    whole: Any = hf.DeepseekVLModel

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config.text_config, DENSE, tensors, dtype, device)
        self.config = config
        config.vision_config._attn_implementation = "sdpa"
        config.vision_config.vision_use_head = False

    @torch.no_grad()
    @full_float32()
    def vision(
        self, patches: Tensor, _grids: Tensor, intermediates: Sequence[str] = (), /
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``.

        ``intermediates``: names in the vision graph.
        """
        with torch.device("meta"):
            model = type(self).whole(self.config).eval().to(self.dtype)
        stream_parts(self.parts(model), self.fill)
        tower = model.get_submodule("vision_model")
        embeddings: Any = tower.get_submodule("embeddings")
        embeddings.position_ids = torch.arange(embeddings.num_positions, device=self.device)[None]
        found = keep_tensors(tower, intermediates, _PLACES, "encoder.layers")
        pixels = [images.to(self.device, self.dtype) for images in self.pixels(patches)]
        features = model.get_image_features(*pixels, return_dict=True)
        embeds = features.pooler_output.flatten(0, 1).cpu()
        return VisionStates(embeds, embeds.new_zeros(0, *embeds.shape), found)

    def pixels(self, patches: Tensor) -> tuple[Tensor, ...]:
        """Return the images that the model gets, of packed ``patches [n, D]``."""
        vision = self.config.vision_config
        side = vision.image_size // vision.patch_size
        return (pixels_from_patches(patches, side),)

    def parts(self, model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        """Yield the parts of the tower and the prefix of their tensors."""
        tower = model.get_submodule("vision_model")
        yield tower.get_submodule("embeddings"), "visual.embeddings."
        for index, layer in enumerate(tower.get_submodule("encoder.layers").children()):
            yield layer, f"visual.encoder.layers.{index}."
        yield tower.get_submodule("post_layernorm"), "visual.post_layernorm."
        yield model.get_submodule("aligner"), "visual.aligner."


def pixels_from_patches(patches: Tensor, side: int) -> Tensor:
    """Assemble patches [n, 3 * p * p], row by row, to images [F, 3, side * p, side * p]."""
    patch = round((patches.shape[1] // 3) ** 0.5)
    cut = patches.view(-1, side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(len(cut), 3, side * patch, side * patch)


_PLACES: dict[str, Place] = {
    "embeddings": ("embeddings", False),
    "norm1": ("layer_norm1", False),
    "attn.output": ("self_attn.out_proj", False),
    "attention_residual": ("layer_norm2", True),
    "norm2": ("layer_norm2", False),
    "mlp.fc1": ("mlp.fc1", False),
    "mlp.fc2": ("mlp.fc2", False),
    "output": ("", False),
}
"""Name in the vision graph -> its place in the tower."""
