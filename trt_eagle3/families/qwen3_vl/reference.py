"""Qwen3-VL as ``transformers`` computes it; its parts are loaded and released one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.parity.ops import full_float32
from trt_eagle3.parity.reference.target import DecoderModules, TargetReference, VisionStates
from trt_eagle3.parity.reference.tower import Place, keep_tensors, split_grids, stream_parts

__all__ = ["Qwen3VLReference"]

_MODULES = DecoderModules(
    layer=hf.Qwen3VLTextDecoderLayer,
    norm=hf.Qwen3VLTextRMSNorm,
    rope=hf.Qwen3VLTextRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
)

_PLACES: dict[str, Place] = {
    "embeddings": ("blocks.0", True),
    "patch_embed": ("patch_embed", False),
    "norm1": ("norm1", False),
    "attn.qkv": ("attn.qkv", False),
    "attn.output": ("attn.proj", False),
    "attention_residual": ("norm2", True),
    "norm2": ("norm2", False),
    "mlp.fc1": ("mlp.linear_fc1", False),
    "mlp.fc2": ("mlp.linear_fc2", False),
    "output": ("", False),
}


class Qwen3VLReference(TargetReference):
    """A Qwen3-VL target. ``tensors``: canonical name -> place (``TargetCheckpoint``).

    Attributes:
        modules, tower, whole: transformers' classes of the decoder, the tower, and the model that
            computes positions.
        places: name in the vision graph -> its place in the tower.
        uniform: config fields of a tower whose blocks are all alike.
    """

    modules = _MODULES
    tower: Any = hf.Qwen3VLVisionModel
    whole: Any = hf.Qwen3VLModel
    places = _PLACES
    uniform: Mapping[str, Any] = {"deepstack_visual_indexes": []}

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config.text_config, self.modules, tensors, dtype, device)
        self.config = config
        config.vision_config._attn_implementation = "sdpa"

    @property
    def num_visual_levels(self) -> int:
        """Number of deepstack levels, which the first decoder layers receive."""
        return len(getattr(self.config.vision_config, "deepstack_visual_indexes", ()))

    def rope_index(
        self, token_ids: Tensor, grid_thw: Tensor, grid_seconds: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Return transformers' positions [3, S] and rope_delta; the grids are in prompt order."""
        kinds = (token_ids == self.config.image_token_id).int() + 2 * (
            token_ids == self.config.video_token_id
        ).int()
        merge = self.config.vision_config.spatial_merge_size
        images, videos = split_grids(kinds, grid_thw, merge)
        positions, delta = self._get_rope_index(
            token_ids[None],
            kinds[None],
            grid_seconds[videos] if videos and grid_seconds is not None else None,
            image_grid_thw=grid_thw[images] if images else None,
            video_grid_thw=grid_thw[videos] if videos else None,
        )
        return positions[:, 0], int(delta.flatten()[0])

    def _get_rope_index(
        self, token_ids: Tensor, kinds: Tensor, _seconds: Tensor | None, /, **grids: Tensor | None
    ) -> Any:
        """Call transformers' method; ``_seconds``: of the videos' grids, which not all take."""
        return self._weightless.get_rope_index(token_ids, kinds, **grids)

    @cached_property
    def _weightless(self) -> Any:
        """The whole model on the meta device, kept because its creation is slow.

        It computes positions.
        """
        with torch.device("meta"):
            return self.whole(self.config)

    @torch.no_grad()
    @full_float32()
    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = ()
    ) -> VisionStates:
        """Run the tower over packed ``patches [n, D]``.

        ``intermediates``: names in the vision graph.
        """
        with torch.device("meta"):
            tower = self.tower(self.config.vision_config).eval()
        tower.rotary_pos_emb = self._vision_rotary
        parts = [(m, f"visual.{name}.") for name, m in tower.named_modules() if _is_streamed(name)]
        stream_parts(parts, self.fill)
        found = keep_tensors(tower, intermediates, self.places)
        out = tower(patches.to(self.device, self.dtype), grid_thw=grid_thw.to(self.device))
        levels = [level.cpu() for level in getattr(out, "deepstack_features", ())]
        embeds = out.pooler_output.cpu()
        return VisionStates(
            embeds, torch.stack(levels) if levels else embeds.new_zeros(0, *embeds.shape), found
        )

    @cached_property
    def _vision_rotary(self) -> nn.Module:
        """The tower's rotary embedding from a tower of one block, in any transformers version."""
        config = copy.deepcopy(self.config.vision_config)
        config.update({"depth": 1, **self.uniform})
        rotary: nn.Module = self.tower(config).rotary_pos_emb.to(self.device)
        return rotary


def _is_streamed(name: str) -> bool:
    """Return whether a part of the tower is loaded and released on its own."""
    parts = name.split(".")
    lists = {"blocks", "deepstack_merger_list", "merger_list"}
    return name in {"patch_embed", "pos_embed", "merger"} or (len(parts) == 2 and parts[0] in lists)
