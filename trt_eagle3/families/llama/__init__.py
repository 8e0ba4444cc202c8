"""Llama 2 and 3.x, dense and text-only, and models of its architecture such as SmolLM2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_eagle3.families.qwen3 import Qwen3Family

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Llama(Qwen3Family):
    """Implements ``families.family.Family``; prompts are prepared as Qwen3's."""

    title = "Llama"
    architecture = "LlamaForCausalLM"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.llama.reader import read_llama

        return read_llama(config)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import LlamaConfig

        from trt_eagle3.families.llama.reference import DENSE
        from trt_eagle3.families.qwen3.reference import Qwen3Reference

        config = LlamaConfig.from_pretrained(spec.path)
        return Qwen3Reference(config, DENSE, spec.tensors, dtype, device)


FAMILY = _Llama()
