"""Qwen3-VL as a mixture of experts: Qwen3-VL with some sparse decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3_vl import Qwen3VLFamily

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Qwen3VLMoe(Qwen3VLFamily):
    """Implements ``families.family.Family``."""

    title = "Qwen3-VL-MoE"
    architecture = "Qwen3VLMoeForConditionalGeneration"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
        from trt_eagle3.families.qwen3_vl.reader import read_qwen3_vl

        sparse = SparseLayers(always_renormalises=True)
        architecture = "Qwen3VLMoeForConditionalGeneration"
        return read_qwen3_vl(config, "qwen3_vl_moe", architecture, sparse)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3VLMoeConfig

        from trt_eagle3.families.qwen3_vl_moe.reference import Qwen3VLMoeReference

        config = Qwen3VLMoeConfig.from_pretrained(spec.path)
        return Qwen3VLMoeReference(config, spec.tensors, dtype, device)


FAMILY = _Qwen3VLMoe()
