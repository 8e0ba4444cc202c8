"""DeepSeek-VL with two towers: SigLIP, and SAM over a larger square of each image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.families.deepseek_vl import DeepseekVLFamily, DeepseekVLVision
from trt_eagle3.spec import TargetSpec, VisionSpec

if TYPE_CHECKING:
    import onnx
    import torch

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.families.family import TowerSizes
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY"]


class _Vision(DeepseekVLVision):
    """Implements ``families.family.FamilyVision``."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        from trt_eagle3.families.deepseek_vl_hybrid.vision_graph import vision_graph

        return vision_graph(spec, dtype, resolve)

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        from trt_eagle3.families.deepseek_vl_hybrid.sam import hybrid_sizes

        return hybrid_sizes(vision)


class _DeepseekVLHybrid(DeepseekVLFamily):
    """Implements ``families.family.Family``."""

    title = "DeepSeek-VL hybrid"
    architecture = "DeepseekVLHybridForConditionalGeneration"
    vision = _Vision()

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.deepseek_vl_hybrid.reader import read_hybrid

        return read_hybrid(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.deepseek_vl_hybrid.prompt import DeepseekVLHybridRules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(directory, spec, DeepseekVLHybridRules, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import DeepseekVLHybridConfig

        from trt_eagle3.families.deepseek_vl_hybrid.reference import DeepseekVLHybridReference

        config = DeepseekVLHybridConfig.from_pretrained(spec.path)
        return DeepseekVLHybridReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, _processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.deepseek_vl_hybrid.processor_reference import (
            DeepseekVLHybridProcessorReference,
        )
        from trt_eagle3.families.deepseek_vl_hybrid.reference import DeepseekVLHybridReference

        assert isinstance(reference, DeepseekVLHybridReference), type(reference).__name__
        return DeepseekVLHybridProcessorReference(checkpoint, reference)


FAMILY = _DeepseekVLHybrid()
