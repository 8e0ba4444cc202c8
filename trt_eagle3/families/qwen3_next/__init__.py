"""Qwen3-Next: Qwen3.5's layers, text-only, with the projections of linear attention fused.

Facts: transformers' ``modeling_qwen3_next.py``, and vLLM's ``qwen3_next_mtp.py`` of the MTP head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Qwen3Next(Qwen3Family):
    """Implements ``families.family.Family``."""

    title = "Qwen3-Next"
    architecture = "Qwen3NextForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_next.reader import read_qwen3_next

        return read_qwen3_next(config)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3NextConfig

        from trt_eagle3.families.qwen3.reference import Qwen3Reference
        from trt_eagle3.families.qwen3_next.reference import FUSED

        config = Qwen3NextConfig.from_pretrained(spec.path)
        return Qwen3Reference(config, FUSED, spec.tensors, dtype, device)


FAMILY = _Qwen3Next()
