"""The reference of the tiny pair, in which no fault is planted: loaded once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from tests.parity.planting import SPEC
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.qwen3_vl.processor_reference import Qwen3VLProcessorReference
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity import run
from trt_eagle3.parity.reference.target import TargetLayer, VisionStates, load_reference

__all__ = ["share_reference"]


class SharedReference(Qwen3VLReference):
    """Keeps its layers, and what it made of images."""

    def __init__(self) -> None:
        super().__init__(Qwen3VLConfig.from_pretrained(SPEC.path), SPEC.tensors)
        self._seen: dict[tuple[Any, ...], VisionStates] = {}

    @cached_property
    def _layers(self) -> list[TargetLayer]:
        return list(super().layers())

    def layers(self, indices: Sequence[int] | None = None) -> Iterator[TargetLayer]:
        return iter(self._layers if indices is None else [self._layers[k] for k in indices])

    def vision(
        self, patches: Tensor, grid_thw: Tensor, intermediates: Sequence[str] = ()
    ) -> VisionStates:
        given = patches.float().numpy().tobytes(), str(grid_thw.tolist()), *intermediates
        if given not in self._seen:
            self._seen[given] = super().vision(patches, grid_thw, intermediates)
        return self._seen[given]


class SharedProcessor(Qwen3VLProcessorReference):
    """Prepares prompts with a processor of transformers that was loaded once."""

    _loaded: ClassVar[Any] = None

    @property
    def _processor(self) -> Any:
        if SharedProcessor._loaded is None:
            SharedProcessor._loaded = Qwen3VLProcessorReference._processor.func(self)
        return SharedProcessor._loaded


@cache
def _target() -> SharedReference:
    return SharedReference()


def share_reference(patch: pytest.MonkeyPatch) -> None:
    """Have validations of the tiny pair, in float32, use one reference."""

    def load(spec: TargetCheckpoint, dtype: torch.dtype, device: str, *scales: Any) -> Any:
        shared = spec.tensors == SPEC.tensors and dtype == torch.float32 and not any(scales)
        return _target() if shared else load_reference(spec, dtype, device, *scales)

    patch.setattr(run, "load_reference", load)
    patch.setattr(FAMILY, "processor_reference", SharedProcessor)
