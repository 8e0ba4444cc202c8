"""What a decoder layer's products are multiplied with, over all prompts.

Shapes: n rows of a prompt, K channels of an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from trt_eagle3.spec import AttentionSpec, LayerSpec

__all__ = ["MAX_SAMPLES", "LayerActivations", "RowStatistics", "inputs_of_layer"]

MAX_SAMPLES = 512
"""Rows of all prompts that are kept to measure errors with."""
_LEAST = 1e-9


def inputs_of_layer(index: int) -> Mapping[str, tuple[str, ...]]:
    """Graph name of an input in decoder layer ``index`` -> canonical names of the weights that it
    is multiplied with.
    """
    p = f"layers.{index}."
    weights = {
        f"{p}input_layernorm": [f"self_attn.{name}" for name in "qkv"],
        f"{p}self_attn.out": ["self_attn.o"],
        f"{p}post_attention_layernorm": ["mlp.gate", "mlp.up"],
        f"{p}mlp.inner": ["mlp.down"],
    }
    return {x: tuple(f"{p}{name}_proj.weight" for name in of) for x, of in weights.items()}


class RowStatistics:
    """Sums over rows [n, K], each divided by its root mean square first: the next norm divides each
    row as a whole, so one of large numbers counts no more than the others.
    """

    def __init__(self, stride: int) -> None:
        self._stride, self._rows = stride, 0
        self._products: Tensor | None = None
        self._magnitudes: Tensor | None = None
        self._samples: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Count ``rows``; every ``stride``-th of all is kept."""
        found = rows / rows.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=_LEAST)
        if self._products is None or self._magnitudes is None:
            self._products, self._magnitudes = found.T @ found, found.abs().sum(dim=0)
        else:
            self._products.addmm_(found.T, found)
            self._magnitudes += found.abs().sum(dim=0)
        self._samples.append(found[-self._rows % self._stride :: self._stride])
        self._rows += len(rows)

    @property
    def num_rows(self) -> int:
        """Of all prompts."""
        return self._rows

    @cached_property
    def mean_products(self) -> Tensor:
        """float32 [K, K]: of each two channels; read it when all rows are added."""
        assert self._products is not None
        return self._products.div_(self._rows)

    @property
    def mean_magnitude(self) -> Tensor:
        """float32 [K]."""
        assert self._magnitudes is not None
        return self._magnitudes / self._rows

    @property
    def samples(self) -> Tensor:
        """float32 [rows, K]."""
        return torch.cat(self._samples)


class LayerActivations:
    """Statistics of a layer's inputs, where ``weights`` are made by them; the largest key of each
    head, and value of each channel.
    """

    def __init__(
        self, layer: LayerSpec, index: int, num_tokens: int, *, weights: bool = True
    ) -> None:
        stride = -(-num_tokens // MAX_SAMPLES)
        assert isinstance(layer.mixer, AttentionSpec), "calibration refuses recurrent layers"
        self._heads, self._prefix = layer.mixer.num_kv_heads, f"layers.{index}.self_attn."
        names = inputs_of_layer(index) if weights else ()
        self.inputs = {name: RowStatistics(stride) for name in names}
        self._k = torch.zeros(self._heads)
        self._v = torch.zeros(self._heads * layer.mixer.head_dim)

    def add(self, traced: Mapping[str, Tensor]) -> None:
        """Count a prompt's tensors, as ``TargetLayer.trace`` names them."""
        for name, statistics in self.inputs.items():
            statistics.add(traced[name])
        k, v = (traced[f"{self._prefix}{p}"].abs().amax(dim=0).cpu() for p in "kv")
        self._k = torch.maximum(self._k, k.view(self._heads, -1).amax(dim=1))
        self._v = torch.maximum(self._v, v)

    @property
    def k_amax(self) -> Tensor:
        """float32 [kv heads]: after norm and rotation, as it is in the cache."""
        return self._k

    def v_amax(self, scales: Tensor | None) -> Tensor:
        """float32 [kv heads], of values whose channels are divided by ``scales``."""
        values = self._v if scales is None else self._v / scales
        return values.view(self._heads, -1).amax(dim=1)
