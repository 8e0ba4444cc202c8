"""Qwen3.5, dense: layers of linear attention (gated delta net) and of gated full attention.

It has Qwen3-VL's vision tower, without visual levels, or is text-only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family
from trt_eagle3.families.qwen3_vl import Qwen3VLFamily

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY", "TEXT_FAMILY"]


class _Qwen35(Qwen3VLFamily):
    """Implements ``families.family.Family``."""

    title = "Qwen3.5 (3.6 and 3.8 too)"
    architecture = "Qwen3_5ForConditionalGeneration"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config, "qwen3_5", "Qwen3_5")

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5Config

        from trt_eagle3.families.qwen3_5.reference import Qwen35Reference

        config = Qwen3_5Config.from_pretrained(spec.path)
        return Qwen35Reference(config, spec.tensors, dtype, device)


class _Qwen35Text(Qwen3Family):
    """Implements ``families.family.Family``."""

    title = "Qwen3.5 (3.6 and 3.8 too), text-only"
    architecture = "Qwen3_5ForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config, "qwen3_5", "Qwen3_5")

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5TextConfig

        from trt_eagle3.families.qwen3.reference import Qwen3Reference
        from trt_eagle3.families.qwen3_5.reference import HYBRID

        config = Qwen3_5TextConfig.from_pretrained(spec.path)
        return Qwen3Reference(config, HYBRID, spec.tensors, dtype, device)


FAMILY = _Qwen35()
TEXT_FAMILY = _Qwen35Text()
