"""Qwen2.5-VL as ``transformers`` computes it; its parts are loaded and released one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules
from trt_eagle3.parity.reference.tower import Place

__all__ = ["Qwen25VLReference"]

_MODULES = DecoderModules(
    layer=hf.Qwen2_5_VLDecoderLayer,
    norm=hf.Qwen2_5_VLRMSNorm,
    rope=hf.Qwen2_5_VLRotaryEmbedding,
    apply_rope=hf.apply_rotary_pos_emb,
    axes=True,
)
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


class Qwen25VLReference(Qwen3VLReference):
    """A Qwen2.5-VL target. Rows of the vision graph's tensors are in window order, as here."""

    modules = _MODULES
    tower = hf.Qwen2_5_VisionTransformerPretrainedModel
    whole = hf.Qwen2_5_VLModel
    places = _PLACES
    uniform: Mapping[str, Any] = {"fullatt_block_indexes": []}

    def _get_rope_index(
        self, token_ids: Tensor, kinds: Tensor, seconds: Tensor | None, /, **grids: Tensor | None
    ) -> Any:
        return self._weightless.get_rope_index(
            token_ids, kinds, second_per_grid_ts=seconds, **grids
        )
