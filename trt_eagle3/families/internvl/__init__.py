"""InternVL3 and 3.5: InternViT over equal tiles, and a decoder of Qwen2, Qwen3 or Qwen3-MoE.

The decoder's positions have one axis.
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
        from trt_eagle3.families.internvl.vision_graph import vision_graph

        return vision_graph(spec, dtype, resolve)

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        from trt_eagle3.families.internvl.tower import tiles_of
        from trt_eagle3.families.internvl.vision_rows import tile_rows

        side = tiles_of(vision).side
        return tile_rows(int(grid_thw[:, 0].sum()), side, vision.spatial_merge_size)

    def padded(
        self, vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        from trt_eagle3.families.internvl.tower import tiles_of
        from trt_eagle3.families.internvl.vision_rows import padded_rows

        side = tiles_of(vision).side
        return padded_rows(inputs, num_patches, side, vision.spatial_merge_size)

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        from trt_eagle3.families.internvl.tower import tower_sizes

        return tower_sizes(vision)

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        from trt_eagle3.families.internvl.tower import tiles_of

        patches = tiles_of(vision).num_patches
        most = max(1, max_tokens * vision.spatial_merge_size**2 // patches)
        tiles = 1, max(1, most // 4), most
        one, usual, all_tiles = tiles
        return {
            "patches": (one * patches, usual * patches, all_tiles * patches),
            "rows": (one * (patches + 1), usual * (patches + 1), all_tiles * (patches + 1)),
            "frame_bounds": (one + 1, usual + 1, all_tiles + 1),
        }


class _InternVL:
    """Implements ``families.family.Family``."""

    title = "InternVL"
    architecture = "InternVLForConditionalGeneration"
    vision = _Vision()

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        from trt_eagle3.families.internvl.reader import read_internvl

        return read_internvl(config)

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        from trt_eagle3.families.internvl.prompt import InternVLRules
        from trt_eagle3.multimodal import Processor

        return Processor.from_directory(
            directory, spec, lambda _, tokenizer: InternVLRules(spec, tokenizer), **options
        )

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        from transformers import InternVLConfig

        from trt_eagle3.families.internvl.reference import InternVLReference

        config = InternVLConfig.from_pretrained(spec.path)
        return InternVLReference(config, spec.tensors, dtype, device)

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        from trt_eagle3.families.internvl.processor_reference import InternVLProcessorReference
        from trt_eagle3.families.internvl.reference import InternVLReference

        assert isinstance(reference, InternVLReference), type(reference).__name__
        return InternVLProcessorReference(checkpoint, reference, processor)


FAMILY = _InternVL()
