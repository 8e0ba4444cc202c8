"""Qwen2.5-VL as ``transformers`` computes it; its parts are loaded and released one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.parity.ops import full_float32
from trt_eagle3.parity.reference.target import DecoderModules, TargetReference, VisionStates
from trt_eagle3.parity.reference.tower import Place, keep_tensors, split_grids, stream_parts

__all__ = ["Qwen25VLReference"]

_MODULES = DecoderModules(
    layer=hf.Qwen2_5_VLDecoderLayer,
    norm=hf.Qwen2_5_VLRMSNorm,
    rope=hf.Qwen2_5_VLRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
)


class Qwen25VLReference(TargetReference):
    """A Qwen2.5-VL target. ``tensors``: canonical name -> place (``TargetCheckpoint``)."""

    num_visual_levels = 0

    def __init__(
        self,
        config: Qwen2_5_VLConfig,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config.text_config, _MODULES, tensors, dtype, device)
        self.config = config
        config.vision_config._attn_implementation = "sdpa"

    def rope_index(
        self, token_ids: Tensor, grid_thw: Tensor, grid_seconds: Tensor, /
    ) -> tuple[Tensor, int]:
        """Return transformers' positions [3, S] and rope_delta; the grids are in prompt order."""
        kinds = (token_ids == self.config.image_token_id).int() + 2 * (
            token_ids == self.config.video_token_id
        ).int()
        merge = self.config.vision_config.spatial_merge_size
        images, videos = split_grids(kinds, grid_thw, merge)
        positions, delta = self._weightless.get_rope_index(
            token_ids[None],
            kinds[None],
            image_grid_thw=grid_thw[images] if images else None,
            video_grid_thw=grid_thw[videos] if videos else None,
            second_per_grid_ts=grid_seconds[videos] if videos else None,
        )
        return positions[:, 0], int(delta[0])

    @cached_property
    def _weightless(self) -> Any:
        """The whole model on the meta device, kept because its creation is slow.

        It computes positions.
        """
        with torch.device("meta"):
            return hf.Qwen2_5_VLModel(self.config)

    @torch.no_grad()
    @full_float32()
    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = (), /
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``.

        ``intermediates``: names in the vision graph, whose rows are in window order as here.
        """
        config = self.config.vision_config
        with torch.device("meta"):
            tower = hf.Qwen2_5_VisionTransformerPretrainedModel(config).eval()
        tower.rotary_pos_emb = self._vision_rotary
        parts = [(m, f"visual.{name}.") for name, m in tower.named_modules() if _is_streamed(name)]
        stream_parts(parts, self.fill)
        found = keep_tensors(tower, intermediates, _PLACES)
        out = tower(patches.to(self.device, self.dtype), grid_thw=grid_thw.to(self.device))
        embeds = out.pooler_output.cpu()
        return VisionStates(embeds, embeds.new_zeros(0, *embeds.shape), found)

    @cached_property
    def _vision_rotary(self) -> nn.Module:
        """The tower's rotary embedding from a tower of one block, in any transformers version."""
        config = copy.deepcopy(self.config.vision_config)
        config.depth, config.fullatt_block_indexes = 1, []
        tower = hf.Qwen2_5_VisionTransformerPretrainedModel(config)
        rotary: nn.Module = tower.rotary_pos_emb.to(self.device)
        return rotary


def _is_streamed(name: str) -> bool:
    """Return whether a part of the tower is loaded and released on its own."""
    parts = name.split(".")
    return name in {"patch_embed", "merger"} or (len(parts) == 2 and parts[0] == "blocks")


_PLACES: dict[str, Place] = {
    "patch_embed": ("patch_embed", False),
    "embeddings": ("blocks.0", True),
    "norm1": ("norm1", False),
    "attn.qkv": ("attn.qkv", False),
    "attn.output": ("attn.proj", False),
    "attention_residual": ("norm2", True),
    "norm2": ("norm2", False),
    "mlp.inner": ("mlp.down_proj", True),
    "mlp.output": ("mlp.down_proj", False),
    "output": ("", False),
}
"""Name in the vision graph -> its place in the tower."""
