"""Activations: the inputs of a decoder layer's products, over all prompts.

Shapes: n rows of a prompt, K channels of an input, H hidden, E experts, k experts of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trt_eagle3.engine.builder.calibration import expert_names
from trt_eagle3.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, SparseMoe

__all__ = [
    "MAX_SAMPLES",
    "ExpertRows",
    "LargestKeys",
    "LayerActivations",
    "RowStatistics",
    "inputs_of_layer",
]

MAX_SAMPLES = 512
"""Number of rows, over all prompts, that are kept to measure errors."""
_LEAST = 1e-9


def inputs_of_layer(layer: LayerSpec, index: int) -> Mapping[str, tuple[str, ...]]:
    """Map graph names of the inputs of decoder layer ``index`` to the weights that multiply them.

    Weights have their canonical names. The input of the experts' second weight is missing: each
    expert has its own.
    """
    prefix = f"layers.{index}."
    norm, mlp = f"{prefix}post_attention_layernorm", f"{prefix}mlp."
    found = _mixer_inputs(layer.mixer, prefix)
    if not isinstance(layer.mlp, SparseMoe):
        return {**found, **_dense_inputs(norm, mlp, f"{mlp}inner")}
    experts = expert_names(index)[:1]
    if not layer.mlp.shared_expert_width:
        return {**found, norm: experts}
    shared = f"{mlp}shared_expert."
    own = _dense_inputs(norm, shared, f"{shared}mlp.inner")
    return {**found, **own, norm: experts + own[norm]}


def _mixer_inputs(mixer: AttentionSpec | GatedDeltaSpec, prefix: str) -> dict[str, tuple[str, ...]]:
    norm = f"{prefix}input_layernorm"
    if isinstance(mixer, GatedDeltaSpec):
        linear = f"{prefix}linear_attn."
        parts = ("qkvz",) if mixer.interleaved else ("qkv", "z")
        made = tuple(f"{linear}in_proj_{p}.weight" for p in parts)
        return {norm: made, f"{linear}out": (f"{linear}out_proj.weight",)}
    attention, out = f"{prefix}self_attn.", "gated" if mixer.output_gate else "out"
    made = tuple(f"{attention}{p}_proj.weight" for p in "qkv")
    return {norm: made, f"{attention}{out}": (f"{attention}o_proj.weight",)}


def _dense_inputs(norm: str, mlp: str, inner: str) -> dict[str, tuple[str, ...]]:
    gate, up, down = (f"{mlp}{p}_proj.weight" for p in ("gate", "up", "down"))
    return {norm: (gate, up), inner: (down,)}


class RowStatistics:
    """Sums over rows [n, K], each divided by its root mean square first.

    The next norm divides each row as a whole, so a row of large numbers must not count more than
    the other rows.
    """

    def __init__(self, stride: int) -> None:
        self._stride, self._rows = stride, 0
        self._products: Tensor | None = None
        self._magnitudes: Tensor | None = None
        self._samples: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Add ``rows``; every ``stride``-th row is kept."""
        found = rows / rows.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=_LEAST)
        if self._products is None or self._magnitudes is None:
            self._products, self._magnitudes = found.T @ found, found.abs().sum(dim=0)
        else:
            self._products.addmm_(found.T, found)
            self._magnitudes += found.abs().sum(dim=0)
        sample = found[-self._rows % self._stride :: self._stride]
        self._samples.append(sample.clone())  # a view would keep all rows
        self._rows += len(rows)

    @property
    def num_rows(self) -> int:
        """Number of rows, of all prompts."""
        return self._rows

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._samples[0].device

    def take_mean_products(self) -> Tensor:
        """float32 [K, K]: mean product of each two channels.

        Call it once, after all rows are added: it releases the sums.
        """
        assert self._products is not None, "the mean products were already taken"
        products, self._products = self._products, None
        return products.div_(self._rows)

    @property
    def mean_magnitude(self) -> Tensor:
        """float32 [K]: mean magnitude of each channel."""
        assert self._magnitudes is not None
        return self._magnitudes / self._rows

    @property
    def samples(self) -> Tensor:
        """float32 [rows, K]: the kept rows."""
        return torch.cat(self._samples)


class ExpertRows:
    """Input rows [n, H] of a layer's experts, and the experts of each row."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._rows: list[Tensor] = []
        self._experts: list[Tensor] = []

    def add(self, rows: Tensor, router_logits: Tensor) -> None:
        """Add the rows of a prompt; logits [n, E]."""
        self._rows.append(rows)
        self._experts.append(router_logits.topk(self._top_k, dim=-1).indices)

    def of(self, expert: int) -> Tensor:
        """float32 [rows, H]: rows of all prompts that ``expert`` receives."""
        pairs = zip(self._rows, self._experts, strict=True)
        return torch.cat([rows[(own == expert).any(dim=-1)] for rows, own in pairs])


class LargestKeys:
    """The largest key of each head and the largest value of each channel of an attention layer."""

    def __init__(self, mixer: AttentionSpec, prefix: str) -> None:
        self._heads, self._prefix = mixer.num_kv_heads, prefix
        self._k = torch.zeros(self._heads)
        self._v = torch.zeros(self._heads * mixer.head_dim)

    def add(self, traced: Mapping[str, Tensor]) -> None:
        """Add the tensors of a prompt."""
        k, v = (traced[f"{self._prefix}self_attn.{p}"].abs().amax(dim=0).cpu() for p in "kv")
        self._k = torch.maximum(self._k, k.view(self._heads, -1).amax(dim=1))
        self._v = torch.maximum(self._v, v)

    @property
    def k_amax(self) -> Tensor:
        """float32 [kv heads]: after norm and rotation, as in the cache."""
        return self._k

    def v_amax(self, scales: Tensor | None) -> Tensor:
        """float32 [kv heads]: of values whose channels are divided by ``scales``."""
        values = self._v if scales is None else self._v / scales
        return values.view(self._heads, -1).amax(dim=1)


class LayerActivations:
    """Statistics of one layer.

    Attributes:
        inputs: statistics by graph name; empty if no weights are made.
        experts: rows of a mixture's experts; None without a mixture, or if no weights are made.
        kv: largest keys and values; None for a layer without attention.
    """

    def __init__(
        self, layer: LayerSpec, index: int, num_tokens: int, *, weights: bool = True
    ) -> None:
        stride = -(-num_tokens // MAX_SAMPLES)
        self._prefix = f"layers.{index}."
        names = inputs_of_layer(layer, index) if weights else ()
        self.inputs = {name: RowStatistics(stride) for name in names}
        self.experts: ExpertRows | None = None
        if weights and isinstance(layer.mlp, SparseMoe):
            self.experts = ExpertRows(layer.mlp.top_k)
        self.kv: LargestKeys | None = None
        if isinstance(layer.mixer, AttentionSpec):
            self.kv = LargestKeys(layer.mixer, self._prefix)

    def add(self, traced: Mapping[str, Tensor]) -> None:
        """Add a prompt's tensors, named as by ``TargetLayer.trace``."""
        for name, statistics in self.inputs.items():
            statistics.add(traced[name])
        if self.experts is not None:
            names = (
                f"{self._prefix}{n}" for n in ("post_attention_layernorm", "mlp.router_logits")
            )
            self.experts.add(*(traced[name] for name in names))
        if self.kv is not None:
            self.kv.add(traced)
