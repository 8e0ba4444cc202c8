"""Qwen3.5, dense: layers of linear attention (gated delta net) between layers of gated full
attention; with Qwen3-VL's vision tower, which has no visual levels here, or text-only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.families.qwen3 import FAMILY as QWEN3
from trt_eagle3.families.qwen3_vl import FAMILY as QWEN3_VL
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY", "TEXT_FAMILY"]


class _Qwen35:
    """``families.family.Family``."""

    title = "Qwen3.5"
    vision = QWEN3_VL.vision

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        return QWEN3_VL.processor(directory, spec, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5Config

        from trt_eagle3.families.qwen3_5.reference import Qwen35Reference

        config = Qwen3_5Config.from_pretrained(spec.path)
        return Qwen35Reference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        return QWEN3_VL.processor_reference(checkpoint, reference, processor)


class _Qwen35Text:
    """``families.family.Family``."""

    title = "Qwen3.5, text-only"
    vision = None

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5_text

        return read_qwen3_5_text(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        return QWEN3.processor(directory, spec, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5TextConfig

        from trt_eagle3.families.qwen3_5.reference import Qwen35TextReference

        config = Qwen3_5TextConfig.from_pretrained(spec.path)
        return Qwen35TextReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        return QWEN3.processor_reference(checkpoint, reference, processor)


FAMILY = _Qwen35()
TEXT_FAMILY = _Qwen35Text()
