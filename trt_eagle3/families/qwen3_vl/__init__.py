"""Qwen3-VL: Qwen3's decoder with interleaved three-axis positions, and a vision tower.

The tower's visual levels ("deepstack") are added after the decoder's first layers.
"""

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

__all__ = ["FAMILY", "Qwen3VLFamily"]


class _Vision:
    """Implements ``families.family.FamilyVision``."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        from trt_eagle3.families.qwen3_vl.vision_graph import vision_graph

        return vision_graph(spec, dtype, resolve)

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        from trt_eagle3.families.qwen3_vl.vision_rows import vision_rows

        side = round(vision.num_position_embeddings**0.5)
        return vision_rows(grid_thw, vision.spatial_merge_size, side).inputs()

    def padded(
        self, _vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        from trt_eagle3.families.qwen3_vl.vision_rows import padded_rows

        return padded_rows(inputs, num_patches)

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        from trt_eagle3.families.qwen3_vl.tensors import tower_sizes

        return tower_sizes(vision)

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        from trt_eagle3.families.frames import patch_ranges

        return patch_ranges(vision.spatial_merge_size**2, max_tokens)


class Qwen3VLFamily:
    """Implements ``families.family.Family``."""

    title = "Qwen3-VL"
    architecture = "Qwen3VLForConditionalGeneration"
    vision = _Vision()

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen3_vl.reader import read_qwen3_vl

        return read_qwen3_vl(config, "qwen3_vl", "Qwen3VLForConditionalGeneration")

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.qwen3_vl.prompt import VisualRules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(directory, spec, VisualRules, **options)

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen3VLConfig

        from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference

        config = Qwen3VLConfig.from_pretrained(spec.path)
        return Qwen3VLReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.qwen3_vl.processor_reference import Qwen3VLProcessorReference
        from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference

        assert isinstance(reference, Qwen3VLReference), type(reference).__name__
        return Qwen3VLProcessorReference(checkpoint, reference, processor)


FAMILY = Qwen3VLFamily()
