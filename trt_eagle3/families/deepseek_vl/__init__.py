"""DeepSeek-VL with one tower: Llama's decoder, and SigLIP over one square for each image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.spec import TargetSpec, VisionSpec

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import Tensor

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.families.family import SizeRange, TowerSizes
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["FAMILY", "DeepseekVLFamily", "DeepseekVLVision"]


class DeepseekVLVision:
    """Implements ``families.family.FamilyVision``."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        from trt_eagle3.families.deepseek_vl.vision_graph import vision_graph

        return vision_graph(spec, dtype, resolve)

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        from trt_eagle3.families.deepseek_vl.tower import siglip_of
        from trt_eagle3.families.deepseek_vl.vision_rows import image_rows

        return image_rows(int(grid_thw[:, 0].sum()), siglip_of(vision).num_patches)

    def padded(
        self, vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        """Pad by whole images."""
        from trt_eagle3.families.deepseek_vl.tower import siglip_of
        from trt_eagle3.families.deepseek_vl.vision_rows import image_rows

        patches = siglip_of(vision).num_patches
        if inputs["rope_positions"].shape[1] == num_patches:
            return dict(inputs)
        return image_rows(num_patches // patches, patches)

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        from trt_eagle3.families.deepseek_vl.tower import tower_sizes

        return tower_sizes(vision)

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        from trt_eagle3.families.deepseek_vl.tower import siglip_of

        patches = siglip_of(vision).num_patches
        most = max(1, max_tokens // patches)
        usual = max(1, most // 4)
        return {
            "patches": (patches, usual * patches, most * patches),
            "frame_bounds": (2, usual + 1, most + 1),
        }


class DeepseekVLFamily:
    """Implements ``families.family.Family``."""

    title = "DeepSeek-VL"
    architecture = "DeepseekVLForConditionalGeneration"
    vision = DeepseekVLVision()

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.deepseek_vl.reader import read_deepseek_vl

        return read_deepseek_vl(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.deepseek_vl.prompt import DeepseekVLRules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(directory, spec, DeepseekVLRules, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import DeepseekVLConfig

        from trt_eagle3.families.deepseek_vl.reference import DeepseekVLReference

        config = DeepseekVLConfig.from_pretrained(spec.path)
        return DeepseekVLReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, _processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.deepseek_vl.processor_reference import (
            DeepseekVLProcessorReference,
        )
        from trt_eagle3.families.deepseek_vl.reference import DeepseekVLReference

        assert isinstance(reference, DeepseekVLReference), type(reference).__name__
        return DeepseekVLProcessorReference(checkpoint, reference)


FAMILY = DeepseekVLFamily()
