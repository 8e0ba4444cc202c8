"""Results of calibration: scales and quantised weights; ``calibration/`` computes them.

Scaling multiplies a weight's columns by scales s and divides the producer of its input by s. The
product is the same, and the columns that matter are rounded less (AWQ, arXiv 2306.00978, section
3.2). The producer is a norm, whose weight is divided, or a projection, whose rows are divided. The
graph does not change.

Shapes: K input channels of a weight [N, K]; E experts of inner width I.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import LARGEST_FP8
from trt_eagle3.spec import GatedDeltaSpec, LayerSpec, SparseMoe, TargetSpec

__all__ = ["Calibration", "ChannelScales", "Fold", "expert_names", "folds_of_layer"]

_HEADROOM = 2.0
_LEAST = 1e-6


@dataclass(frozen=True)
class Fold:
    """A place where scales can be folded in.

    Attributes:
        producer: canonical name of the weight that is divided: a norm's, or a projection's by rows.
        consumers: canonical names of the weights whose columns are multiplied.
        heads, head_dim, repeats: layout of the producer's channels, if ``repeats`` query heads
            share a value head, or all heads share one norm; 1 otherwise.
        unscaled: number of first producer channels that the consumers do not read: gates.
        exact: scales are powers of two, because a consumer stays in 16 bits.
        offset: added to a norm's stored weight.
    """

    producer: str
    consumers: tuple[str, ...]
    heads: int = 1
    head_dim: int = 1
    repeats: int = 1
    unscaled: int = 0
    exact: bool = False
    offset: float = 0.0

    def to_columns(self, scales: Tensor) -> Tensor:
        """Expand ``scales`` of the producer's channels to the consumers' columns [..., K]."""
        if self.repeats == 1:
            return scales[..., self.unscaled :]
        by_head = scales.view(self.heads, self.head_dim)
        return by_head.repeat_interleave(self.repeats, dim=0).flatten()

    def to_channels(self, columns: Tensor) -> Tensor:
        """Reduce the columns [K] to the producer's channels: the mean of each channel's columns."""
        if self.repeats == 1:
            return columns
        return columns.view(self.heads, self.repeats, self.head_dim).mean(dim=1).flatten()


def folds_of_layer(layer: LayerSpec, index: int) -> list[Fold]:
    """Return the folds of decoder layer ``index``: q, k, v; o; gate, up; down.

    Some norms are also read by 16-bit weights: a router, a shared expert's gate, the decays of a
    gated delta rule. Their scales are powers of two, which 16 bits hold exactly. If the norm's
    weight is stored less one, its scales are not, and those 16-bit weights are rounded once more.
    """
    return [*_mixer_folds(layer, index), *_mlp_folds(layer, index)]


def _mixer_folds(layer: LayerSpec, index: int) -> Iterator[Fold]:
    """Yield the mixer's folds. Values with a bias get no scales for o, as the bias lacks them."""
    prefix, mixer = f"layers.{index}.", layer.mixer
    if isinstance(mixer, GatedDeltaSpec):
        linear = f"{prefix}linear_attn."
        made, kept = ([f"{linear}in_proj_{p}" for p in own] for own in (("qkv", "z"), "ba"))
        yield _norm_fold(layer, f"{prefix}input_layernorm", made, kept)
        out = (f"{linear}out_proj.weight",)
        yield Fold(f"{linear}norm.weight", out, 1, mixer.value_dim, mixer.num_v_heads)
        return
    attention = f"{prefix}self_attn."
    made = [f"{attention}{p}_proj" for p in "qkv"]
    yield _norm_fold(layer, f"{prefix}input_layernorm", made)
    if not mixer.qkv_bias:
        names = f"{attention}v_proj.weight", (f"{attention}o_proj.weight",)
        repeats = mixer.num_heads // mixer.num_kv_heads
        yield Fold(*names, mixer.num_kv_heads, mixer.head_dim, repeats)


def _mlp_folds(layer: LayerSpec, index: int) -> Iterator[Fold]:
    prefix, spec = f"layers.{index}.mlp.", layer.mlp
    norm = f"layers.{index}.post_attention_layernorm"
    if not isinstance(spec, SparseMoe):
        yield _norm_fold(layer, norm, (f"{prefix}gate_proj", f"{prefix}up_proj"))
        yield _inner_fold(prefix)
        return
    gate_up, down = expert_names(index)
    made, kept = [gate_up], [f"{prefix}gate"]
    if spec.shared_expert_width:
        shared = f"{prefix}shared_expert."
        made += [f"{shared}gate_proj", f"{shared}up_proj"]
        kept += [f"{prefix}shared_expert_gate"]
        yield _inner_fold(shared)
    yield _norm_fold(layer, norm, made, kept)
    yield Fold(gate_up, (down,), unscaled=spec.expert_width)


def expert_names(index: int) -> tuple[str, str]:
    """Return the names of a sparse layer's experts: weights [E, 2 I, H] and [E, H, I]."""
    experts = f"layers.{index}.mlp.experts."
    return f"{experts}gate_up_proj", f"{experts}down_proj"


def _norm_fold(layer: LayerSpec, norm: str, made: Sequence[str], kept: Sequence[str] = ()) -> Fold:
    """The fold of a norm that INT4 weights ``made`` read, and 16-bit weights ``kept``."""
    offset = layer.norm.weight_offset
    exact = bool(kept) and not offset
    return Fold(_weight(norm), tuple(map(_weight, (*made, *kept))), exact=exact, offset=offset)


def _inner_fold(mlp: str) -> Fold:
    return Fold(f"{mlp}up_proj.weight", (f"{mlp}down_proj.weight",))


def _weight(name: str) -> str:
    """The canonical name of a weight; experts' names have no suffix."""
    return name if ".experts." in name else f"{name}.weight"


@dataclass(frozen=True)
class ChannelScales:
    """Scales of a target's channels; those of experts are [E, ...].

    ``by_producer``: canonical name of a fold's producer -> float32, one for each of its channels.
    """

    spec: TargetSpec
    by_producer: Mapping[str, Tensor] = field(default_factory=dict)

    def columns(self, name: str) -> Tensor | None:
        """Return the factors float32 [K] of a weight's columns; None without scales."""
        return self._columns.get(name)

    def rows(self, name: str) -> Tensor | None:
        """Return the divisors float32 [N] of a weight's rows or a norm's values; None without."""
        return self.by_producer.get(name)

    def changes(self, name: str) -> bool:
        """Return whether ``scaled`` changes this weight."""
        return self.rows(name) is not None or self.columns(name) is not None

    def scaled(self, name: str, values: Tensor) -> Tensor:
        """Return a weight [..., N, K], or a norm's, with its scales applied."""
        rows, columns = self.rows(name), self.columns(name)
        if columns is not None:
            values = values * columns.to(values.device)[..., None, :]
        if rows is None:
            return values
        own, offset = rows.to(values.device), self._offsets[name]
        return (values + offset) / (own[..., None] if values.ndim > 1 else own) - offset

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        return dict(self._pairs())

    @cached_property
    def _offsets(self) -> dict[str, float]:
        return {fold.producer: fold.offset for fold in self._folds()}

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        for fold in self._folds():
            columns = fold.to_columns(self.by_producer[fold.producer])
            yield from ((name, columns) for name in fold.consumers)

    def _folds(self) -> Iterator[Fold]:
        """Yield the folds that have scales."""
        for index, layer in enumerate(self.spec.layers):
            folds = folds_of_layer(layer, index)
            yield from (fold for fold in folds if fold.producer in self.by_producer)


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        scales: of the target's channels. weights: canonical name of a weight -> its tensors on
            disk, by the last part of their names, quantised after scaling.
        k_amax, v_amax: by attention layer, float32 [kv heads]: the largest absolute key and value
            of each head, after scaling.
        num_prompts, num_tokens: size of the calibration data.
        experts_without_data: experts that received too few rows to quantise with data.
    """

    scales: ChannelScales
    weights: Mapping[str, Mapping[str, TensorRef]]
    k_amax: Mapping[int, Tensor]
    v_amax: Mapping[int, Tensor]
    num_prompts: int
    num_tokens: int
    experts_without_data: int = 0

    def kv_scales(self) -> dict[int, KVScales]:
        """Return KV scales by layer and head, so that FP8 holds twice the largest observed value.

        The headroom costs almost no precision, as e4m3 is as exact for small numbers. A larger
        value is clamped.
        """
        return {i: KVScales(_scales(k), _scales(self.v_amax[i])) for i, k in self.k_amax.items()}


def _scales(amax: Tensor) -> tuple[float, ...]:
    return tuple((_HEADROOM * amax.clamp(min=_LEAST) / LARGEST_FP8).tolist())
