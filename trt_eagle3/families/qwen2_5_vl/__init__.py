"""Qwen2.5-VL: Qwen2.5's decoder with chunked three-axis positions, and a tower with windows.

The tower's blocks attend within windows of a frame, except for some.
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

__all__ = ["FAMILY"]


class _Vision:
    """Implements ``families.family.FamilyVision``."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        from trt_eagle3.families.qwen2_5_vl.vision_graph import vision_graph

        return vision_graph(spec, dtype, resolve)

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        from trt_eagle3.families.qwen2_5_vl.tower import window_side
        from trt_eagle3.families.qwen2_5_vl.vision_rows import window_rows

        return window_rows(grid_thw, vision.spatial_merge_size, window_side(vision))

    def padded(
        self, _vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        from trt_eagle3.families.qwen2_5_vl.vision_rows import padded_rows

        return padded_rows(inputs, num_patches)

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        from trt_eagle3.families.qwen2_5_vl.tower import tower_sizes

        return tower_sizes(vision)

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        from trt_eagle3.families.frames import patch_ranges

        patches = vision.spatial_merge_size**2
        least, usual, most = (n // patches for n in patch_ranges(patches, max_tokens)["patches"])
        # windows at the edges of frames have fewer tokens: on average a quarter of 16
        windows = 1 << (max_tokens // 4 + 8).bit_length()
        return {
            **patch_ranges(patches, max_tokens),
            "tokens": (least, usual, most),
            "window_bounds": (2, 2, windows + 1),
        }


class _Qwen25VL:
    """Implements ``families.family.Family``."""

    title = "Qwen2.5-VL"
    architecture = "Qwen2_5_VLForConditionalGeneration"
    vision = _Vision()

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.qwen2_5_vl.reader import read_qwen2_5_vl

        return read_qwen2_5_vl(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.qwen2_5_vl.prompt import Qwen25Rules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(
            directory, spec, lambda _, tokenizer: Qwen25Rules(spec, tokenizer), **options
        )

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import Qwen2_5_VLConfig

        from trt_eagle3.families.qwen2_5_vl.reference import Qwen25VLReference

        config = Qwen2_5_VLConfig.from_pretrained(spec.path)
        return Qwen25VLReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.qwen2_5_vl.processor_reference import Qwen25ProcessorReference
        from trt_eagle3.families.qwen2_5_vl.reference import Qwen25VLReference

        assert isinstance(reference, Qwen25VLReference), type(reference).__name__
        return Qwen25ProcessorReference(checkpoint, reference, processor)


FAMILY = _Qwen25VL()
