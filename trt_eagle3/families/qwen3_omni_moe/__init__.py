"""Qwen3-Omni's thinker: Qwen3-VL-MoE's decoder and tower, with video times in the positions.

It reads text, images and videos. Audio, the talker and its codec are not supported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.families.qwen3_vl import Qwen3VLFamily
from trt_eagle3.spec import TargetSpec

if TYPE_CHECKING:
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Qwen3Omni(Qwen3VLFamily):
    """Implements ``families.family.Family``."""

    title = "Qwen3-Omni thinker"
    architecture = "Qwen3OmniMoeForConditionalGeneration"

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_omni_moe.reader import read_thinker

        return read_thinker(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.qwen3_omni_moe.prompt import ThinkerRules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(
            directory, spec, lambda _, tokenizer: ThinkerRules(spec, tokenizer), **options
        )

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3OmniMoeConfig

        from trt_eagle3.families.qwen3_omni_moe.reference import ThinkerReference

        config = Qwen3OmniMoeConfig.from_pretrained(spec.path).thinker_config
        return ThinkerReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.qwen3_omni_moe.processor_reference import (
            ThinkerProcessorReference,
        )
        from trt_eagle3.families.qwen3_omni_moe.reference import ThinkerReference

        assert isinstance(reference, ThinkerReference), type(reference).__name__
        return ThinkerProcessorReference(checkpoint, reference, processor)


FAMILY = _Qwen3Omni()
