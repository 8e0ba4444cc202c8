"""Family: the interface of a target family.

A family's parts belong to several layers: its reader uses ``checkpoint``, its vision graph
``graph``, its prompt rules ``multimodal``, its reference ``parity``. Its methods import them when
they are called, so that reading a checkpoint imports neither onnx nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trt_eagle3.spec import TargetSpec, VisionSpec

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import Tensor

    from trt_eagle3.checkpoint.model_config import ModelConfig
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.graph.builder import ResolveLocation
    from trt_eagle3.multimodal import Processor
    from trt_eagle3.parity.reference.processor import ProcessorReference
    from trt_eagle3.parity.reference.target import TargetReference

__all__ = ["Family", "FamilyVision", "SizeRange", "TowerSizes", "num_values"]


SizeRange = tuple[int, int, int]
"""Smallest, usual and largest size of a dimension."""


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a vision tower, for memory and padding.

    Attributes:
        num_values: numbers in the tower's weights.
        values_per_patch: peak of the numbers held at once per patch.
        patches_per_unit: a run's number of patches may be any multiple of this.
    """

    num_values: int
    values_per_patch: int
    patches_per_unit: int


def num_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Count the numbers in tensors of these shapes."""
    return sum(prod(shape) for shape in shapes.values())


class FamilyVision(Protocol):
    """The vision tower of a family."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        """Build the vision graph of ``spec``, which has a tower.

        Its inputs are ``patches`` T [n, patch_dim] and those of ``inputs``. Its outputs are
        ``visual_embeds`` T [N, H] and, if there are visual levels, ``deepstack`` T [L, N, H].
        """
        ...

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        """Return the vision graph's inputs other than the patches, by name.

        Args:
            grid_thw: int64 [G, 3]: frames, patch rows and patch columns of each image or video.
        """
        ...

    def padded(
        self, vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        """Pad ``inputs`` for a run of ``num_patches`` patches.

        Added patches attend only to each other. The number of frames is one that runs share.
        """
        ...

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        """Return the memory that the tower takes, and the padding unit of its runs."""
        ...

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        """Return the ranges of the graph's named dimensions, for up to ``max_tokens`` per run."""
        ...


class Family(Protocol):
    """A family of targets."""

    @property
    def title(self) -> str:
        """Name for messages."""
        ...

    @property
    def architecture(self) -> str:
        """transformers' name of the model."""
        ...

    @property
    def vision(self) -> FamilyVision | None:
        """Its vision tower; None if its targets read text only."""
        ...

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        """Read the checkpoint of this config, checked against its tensors.

        Raises:
            UserError: its kind is not supported, or its tensors do not fit.
        """
        ...

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        """Create the processor from the tokenizer, chat template and pixel rules in ``directory``.

        The directory is a checkpoint, or the ``processor/`` folder of a bundle.

        ``options`` are those of ``Processor.from_directory``.
        """
        ...

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        """Create the target of ``spec`` as transformers computes it, without reading weights.

        It is used for parity, and for calibration, which reads each layer's activations.
        """
        ...

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        """Prepare prompts as transformers does, for parity.

        Args:
            checkpoint: folder of its processor files.
            reference: computes rope positions.
            processor: the engine's processor, whose settings decode the files.
        """
        ...
