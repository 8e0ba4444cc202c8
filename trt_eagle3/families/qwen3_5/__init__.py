"""Qwen3.5, dense: layers of linear attention (gated delta net) between layers of gated full
attention, and Qwen3-VL's vision tower without visual levels.
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

__all__ = ["FAMILY"]


class _Qwen35:
    """``families.family.Family``."""

    title = "Qwen3.5"
    vision = QWEN3_VL.vision

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_5.reader import read_qwen3_5

        return read_qwen3_5(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        prompts = QWEN3_VL if spec.vision else QWEN3
        return prompts.processor(directory, spec, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3_5Config, Qwen3_5TextConfig

        from trt_eagle3.families.qwen3_5.reference import Qwen35Reference, Qwen35TextReference

        if spec.vision is None:
            text = Qwen3_5TextConfig.from_pretrained(spec.path)
            return Qwen35TextReference(text, spec.tensors, dtype, device)
        config = Qwen3_5Config.from_pretrained(spec.path)
        return Qwen35Reference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference

        prompts = QWEN3_VL if isinstance(reference, Qwen3VLReference) else QWEN3
        return prompts.processor_reference(checkpoint, reference, processor)


FAMILY = _Qwen35()
