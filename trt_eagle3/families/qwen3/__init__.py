"""Qwen3, dense and text-only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY", "Qwen3Family"]


class Qwen3Family:
    """Implements ``families.family.Family`` for text-only models."""

    title = "Qwen3"
    architecture = "Qwen3ForCausalLM"
    vision = None

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3.reader import read_qwen3

        return read_qwen3(config, "qwen3", "Qwen3ForCausalLM")

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.multimodal import Processor
        from trt_eagle3.multimodal.prompt_rules import TextRules

        return Processor.from_directory(directory, spec, TextRules, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3Config

        from trt_eagle3.families.qwen3.reference import DENSE, Qwen3Reference

        config = Qwen3Config.from_pretrained(spec.path)
        return Qwen3Reference(config, DENSE, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, _reference: TargetReference, _processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.qwen3.processor_reference import Qwen3ProcessorReference

        return Qwen3ProcessorReference(checkpoint)


FAMILY = Qwen3Family()
