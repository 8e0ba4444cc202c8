"""Qwen3 as a mixture of experts, text-only: Qwen3's decoder with some sparse layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Qwen3Moe(Qwen3Family):
    """Implements ``families.family.Family``."""

    title = "Qwen3-MoE"
    architecture = "Qwen3MoeForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3.reader import read_qwen3
        from trt_eagle3.families.qwen3.sparse_layers import SparseLayers

        sparse = SparseLayers(always_renormalises=False)
        return read_qwen3(config, "qwen3_moe", "Qwen3MoeForCausalLM", sparse)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3MoeConfig

        from trt_eagle3.families.qwen3.reference import Qwen3Reference
        from trt_eagle3.families.qwen3_moe.reference import SPARSE

        config = Qwen3MoeConfig.from_pretrained(spec.path)
        return Qwen3Reference(config, SPARSE, spec.tensors, dtype, device)


FAMILY = _Qwen3Moe()
