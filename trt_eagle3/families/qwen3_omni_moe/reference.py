"""Qwen3-Omni's thinker as ``transformers`` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity.reference.target import DecoderModules

__all__ = ["ThinkerReference"]

_MERGER = {"norm.": "ln_q.", "linear_fc1.": "mlp.0.", "linear_fc2.": "mlp.2."}


class ThinkerReference(Qwen3VLReference):
    """A thinker target; ``config``: the thinker's section."""

    modules = DecoderModules(
        layer=hf.Qwen3OmniMoeThinkerTextDecoderLayer,
        norm=hf.Qwen3OmniMoeThinkerTextRMSNorm,
        rope=hf.Qwen3OmniMoeThinkerTextRotaryEmbedding,
        apply_rope=hf.apply_rotary_pos_emb,
        axes=True,
    )
    tower = hf.Qwen3OmniMoeVisionEncoder
    whole = hf.Qwen3OmniMoeThinkerForConditionalGeneration

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, TensorRef],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(config, {**tensors, **_towers_names(tensors)}, dtype, device)

    def _get_rope_index(
        self, token_ids: Tensor, _kinds: Tensor, seconds: Tensor | None, /, **grids: Tensor | None
    ) -> Any:
        assert seconds is not None or grids["video_grid_thw"] is None, "videos without times"
        return self._weightless.get_rope_index(
            token_ids, attention_mask=torch.ones_like(token_ids), second_per_grids=seconds, **grids
        )


def _towers_names(tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Map the mergers' tensors to the tower's own names."""
    found = {}
    for name, ref in tensors.items():
        if "merger" in name:
            own = name.replace("deepstack_merger_list", "merger_list")
            for ours, theirs in _MERGER.items():
                own = own.replace(f".{ours}", f".{theirs}")
            found[own] = ref
    return found
