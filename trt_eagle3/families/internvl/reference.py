"""InternVL as ``transformers`` computes it; its parts are loaded and released one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import InternVLConfig
from transformers.models.internvl import modeling_internvl as hf

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.families.qwen2.reference import DENSE as QWEN2
from trt_eagle3.families.qwen3.reference import DENSE as QWEN3
from trt_eagle3.families.qwen3_moe.reference import SPARSE as QWEN3_MOE
from trt_eagle3.parity.ops import full_float32
from trt_eagle3.parity.reference.target import TargetReference, VisionStates
from trt_eagle3.parity.reference.tower import Place, keep_tensors, stream_parts

__all__ = ["InternVLReference", "tiles_from_patches"]

_MODULES = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
"""``model_type`` of the language model -> its modules."""


class InternVLReference(TargetReference):
    """An InternVL target. ``tensors``: canonical name -> place (``TargetCheckpoint``)."""

    num_visual_levels = 0

    def __init__(
        self,
        config: InternVLConfig,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        text = config.text_config
        super().__init__(text, _MODULES[text.model_type], tensors, dtype, device)
        self.config = config
        config.vision_config._attn_implementation = "sdpa"

    @torch.no_grad()
    @full_float32()
    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = (), /
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``.

        ``intermediates``: names in the vision graph.
        """
        with torch.device("meta"):
            model = hf.InternVLModel(self.config).eval().to(self.dtype)
        stream_parts(_parts(model), self.fill)
        found = keep_tensors(model.vision_tower, intermediates, _PLACES, "encoder.layer")
        merge = round(1 / self.config.downsample_ratio)
        pixels = tiles_from_patches(patches, grid_thw, self.config.vision_config, merge)
        features = model.get_image_features(
            pixels.to(self.device, self.dtype),
            vision_feature_layer=self.config.vision_feature_layer,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            return_dict=True,
        )
        embeds = features.pooler_output.flatten(0, 1).cpu()
        return VisionStates(embeds, embeds.new_zeros(0, *embeds.shape), found)


def tiles_from_patches(patches: Tensor, grid_thw: Tensor, vision: object, merge: int) -> Tensor:
    """Assemble patches [n, C * p * p] in merge-block order to tiles [F, C, H, W]."""
    channels, side = int(vision.num_channels), int(vision.patch_size[0])  # type: ignore[attr-defined]
    _, rows, columns = grid_thw[0].tolist()
    cut = patches.view(-1, rows // merge, columns // merge, merge, merge, channels, side, side)
    whole = cut.permute(0, 5, 1, 3, 6, 2, 4, 7)
    return whole.reshape(len(cut), channels, rows * side, columns * side)


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    tower = model.get_submodule("vision_tower")
    yield tower.get_submodule("embeddings"), "visual.embeddings."
    for index, layer in enumerate(tower.get_submodule("encoder.layer").children()):
        yield layer, f"visual.encoder.layer.{index}."
    last = tower.get_submodule("layernorm")
    if last.state_dict():
        yield last, "visual.layernorm."
    yield model.get_submodule("multi_modal_projector"), "visual.projector."


_PLACES: dict[str, Place] = {
    "embeddings": ("encoder.layer.0", True),
    "norm1": ("layernorm_before", False),
    "attn.output": ("attention.projection_layer", False),
    "attention_residual": ("layernorm_after", True),
    "norm2": ("layernorm_after", False),
    "mlp.fc1": ("mlp.fc1", False),
    "mlp.fc2": ("mlp.fc2", False),
    "output": ("", False),
}
"""Name in the vision graph -> its place in the tower."""
