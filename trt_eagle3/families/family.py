"""What a family gives the rest of the program.

A family's parts live on several levels: its reader uses ``checkpoint``, its vision graph ``graph``,
its prompt rules ``multimodal``, its reference ``parity``. Its methods import them when they are
called, so that whoever reads a checkpoint imports neither onnx nor torch.
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
    """What the rest of the program counts with.

    Attributes:
        num_values: numbers in the tower's weights.
        values_per_patch: numbers that it holds at once for a patch, at its fullest place.
        patches_per_unit: a run may have any multiple of so many patches.
    """

    num_values: int
    values_per_patch: int
    patches_per_unit: int


def num_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in tensors of these shapes."""
    return sum(prod(shape) for shape in shapes.values())


class FamilyVision(Protocol):
    """The vision tower of a family."""

    def graph(
        self, spec: TargetCheckpoint, dtype: str, resolve: ResolveLocation
    ) -> onnx.ModelProto:
        """The vision graph of ``spec``, which has a tower.

        Input ``patches`` T [n, patch_dim] and those of ``inputs``; outputs ``visual_embeds`` T
        [N, H] and, where there are visual levels, ``deepstack`` T [L, N, H].
        """
        ...

    def inputs(self, vision: VisionSpec, grid_thw: Tensor) -> dict[str, Tensor]:
        """The vision graph's inputs besides the patches, by name.

        Args:
            grid_thw: int64 [G, 3]: frames, patch rows and patch columns of each image or video.
        """
        ...

    def padded(
        self, vision: VisionSpec, inputs: Mapping[str, Tensor], num_patches: int
    ) -> dict[str, Tensor]:
        """``inputs`` for a run of ``num_patches`` patches, of which those added see each other
        alone, and of a number of frames that runs share.
        """
        ...

    def sizes(self, vision: VisionSpec) -> TowerSizes:
        """What it takes of memory, and how its runs are padded."""
        ...

    def ranges(self, vision: VisionSpec, max_tokens: int) -> Mapping[str, SizeRange]:
        """The named dimensions of the graph's inputs, for up to so many visual tokens a run."""
        ...


class Family(Protocol):
    """A family of targets."""

    @property
    def title(self) -> str:
        """What people call it."""
        ...

    @property
    def architecture(self) -> str:
        """transformers' name of the model."""
        ...

    @property
    def vision(self) -> FamilyVision | None:
        """Its vision tower; None where targets read text only."""
        ...

    def read(self, config: ModelConfig) -> TargetCheckpoint:
        """The checkpoint whose config this is, checked against its tensors.

        Raises:
            UserError: a kind of it that is not supported, or tensors that do not fit.
        """
        ...

    def processor(self, directory: Path, spec: TargetSpec, **options: Any) -> Processor:
        """The tokenizer, chat template and pixel rules in ``directory``: a checkpoint, or the
        ``processor/`` folder of a bundle.

        ``options`` are those of ``Processor.from_directory``.
        """
        ...

    def reference(
        self, spec: TargetCheckpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TargetReference:
        """The target of ``spec`` as transformers computes it; for parity, and for calibration,
        which looks at each layer's activations. No weight is read yet.
        """
        ...

    def processor_reference(
        self, checkpoint: Path, reference: TargetReference, processor: Processor, /
    ) -> ProcessorReference:
        """The prompt as transformers prepares it; for parity.

        Args:
            checkpoint: where its processor files are. reference: what knows rope positions.
            processor: the engine's, as which files are decoded.
        """
        ...
