"""Qwen2 and Qwen2.5, dense and text-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Qwen2(Qwen3Family):
    """Implements ``families.family.Family``; prompts are prepared as Qwen3's."""

    title = "Qwen2"
    architecture = "Qwen2ForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen2.decoder import Qwen2Decoder
        from trt_eagle3.families.qwen3.reader import read_text_target

        decoder = Qwen2Decoder(config)
        return read_text_target(decoder, "qwen2", self.title, self.architecture, first_window=28)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen2Config

        from trt_eagle3.families.qwen2.reference import DENSE
        from trt_eagle3.families.qwen3.reference import Qwen3Reference

        config = Qwen2Config.from_pretrained(spec.path)
        return Qwen3Reference(config, DENSE, spec.tensors, dtype, device)


FAMILY = _Qwen2()
