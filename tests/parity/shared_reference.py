"""References of the tiny pair's checkpoints, in which no fault is planted: loaded once for all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import Qwen3VLConfig

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.qwen3_vl import FAMILY
from trt_eagle3.families.qwen3_vl.processor_reference import Qwen3VLProcessorReference
from trt_eagle3.families.qwen3_vl.reference import Qwen3VLReference
from trt_eagle3.parity import run
from trt_eagle3.parity.reference.target import (
    Rope,
    TargetLayer,
    TargetReference,
    VisionStates,
)

__all__ = ["share_reference"]


_OUTPUTS = 64
"""Of a layer: those of the latest validations, and of prompts, which all of them ask for."""


class SharedLayer(TargetLayer):
    """Keeps what it gave: a fault elsewhere gives it the same rows once more."""

    def __init__(self, layer: TargetLayer) -> None:
        vars(self).update(vars(layer))
        self._layer = layer
        self._given: OrderedDict[bytes, Tensor] = OrderedDict()

    def __call__(self, hidden: Tensor, rope: Rope) -> Tensor:
        parts = (hidden, *rope)
        given = b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in parts)
        key = blake2b(given).digest()
        found = self._given.pop(key, None)
        self._given[key] = self._layer(hidden, rope) if found is None else found
        if len(self._given) > _OUTPUTS:
            self._given.popitem(last=False)
        return self._given[key]

    def trace(self, hidden: Tensor, rope: Rope) -> dict[str, Tensor]:
        return self._layer.trace(hidden, rope)


class SharedReference(Qwen3VLReference):
    """Keeps its layers, and what it made of images."""

    def __init__(
        self, spec: TargetCheckpoint, kv_scales: Mapping[int, KVScales], dtype: torch.dtype
    ) -> None:
        super().__init__(Qwen3VLConfig.from_pretrained(spec.path), spec.tensors, dtype)
        self.kv_scales = kv_scales
        self._seen: dict[tuple[Any, ...], VisionStates] = {}

    @cached_property
    def _layers(self) -> list[TargetLayer]:
        return [SharedLayer(layer) for layer in super().layers()]

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


_KEPT = 8
_SHARED: list[tuple[Mapping[str, Any], SharedReference]] = []
"""By their tensors; the latest last."""


def _shared(
    spec: TargetCheckpoint, kv_scales: Mapping[int, KVScales], dtype: torch.dtype
) -> SharedReference:
    for tensors, reference in _SHARED:
        if (reference.dtype, reference.kv_scales) == (dtype, kv_scales) and tensors == spec.tensors:
            return reference
    _SHARED.append((spec.tensors, SharedReference(spec, kv_scales, dtype)))
    del _SHARED[:-_KEPT]
    return _SHARED[-1][1]


def share_reference(patch: pytest.MonkeyPatch) -> None:
    """Have validations of the tiny pair, and of what was quantised of it, use one reference of
    each type.
    """

    def load(
        spec: TargetCheckpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_scales: Mapping[int, KVScales] | None = None,
    ) -> TargetReference:
        assert str(device) == "cpu"
        return _shared(spec, kv_scales or {}, dtype)

    patch.setattr(run, "load_reference", load)
    patch.setattr(FAMILY, "processor_reference", SharedProcessor)
