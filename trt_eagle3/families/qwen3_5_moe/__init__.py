"""Qwen3.5 as a mixture of experts: Qwen3.5 with sparse layers that have a shared expert.

It has the vision tower, or is text-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family
from trt_eagle3.families.qwen3_vl import Qwen3VLFamily

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY", "TEXT_FAMILY"]


class _Qwen35Moe(Qwen3VLFamily):
    """Implements ``families.family.Family``."""

    title = "Qwen3.5-MoE (3.6 and 3.8 too)"
    architecture = "Qwen3_5MoeForConditionalGeneration"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config, "qwen3_5_moe", "Qwen3_5Moe", _sparse())

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5MoeConfig

        from trt_eagle3.families.qwen3_5_moe.reference import Qwen35MoeReference

        config = Qwen3_5MoeConfig.from_pretrained(spec.path)
        return Qwen35MoeReference(config, spec.tensors, dtype, device)


class _Qwen35MoeText(Qwen3Family):
    """Implements ``families.family.Family``."""

    title = "Qwen3.5-MoE (3.6 and 3.8 too), text-only"
    architecture = "Qwen3_5MoeForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config, "qwen3_5_moe", "Qwen3_5Moe", _sparse())

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5MoeTextConfig

        from trt_eagle3.families.qwen3.reference import Qwen3Reference
        from trt_eagle3.families.qwen3_5_moe.reference import SPARSE

        config = Qwen3_5MoeTextConfig.from_pretrained(spec.path)
        return Qwen3Reference(config, SPARSE, spec.tensors, dtype, device)


def _sparse() -> SparseLayers:
    from trt_eagle3.families.qwen3.sparse_layers import SparseLayers

    return SparseLayers(always_renormalises=True, shared_expert=True)


FAMILY = _Qwen35Moe()
TEXT_FAMILY = _Qwen35MoeText()
