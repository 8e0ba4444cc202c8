"""Calibration: what a target's activations made of its weights; ``calibration/`` finds it.

Scaling: a weight's columns are multiplied by scales s and what makes its input is divided by them,
so that the product is the same and the columns that matter are rounded less (AWQ, arXiv 2306.00978,
section 3.2). What makes the input is a norm, whose weight is divided, or a projection, whose rows
are: the graph stays as it is.

Shapes: K input channels of a weight [N, K]; E experts of inner width I.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import LARGEST_FP8
from trt_eagle3.spec import AttentionSpec, LayerSpec, SparseMoe, TargetSpec

__all__ = ["Calibration", "ChannelScales", "Fold", "expert_names", "folds_of_layer"]

_HEADROOM = 2.0
_LEAST = 1e-6


@dataclass(frozen=True)
class Fold:
    """A place where scales can be folded in.

    Attributes:
        producer: canonical name of what is divided: a norm's weight, or a projection's, by rows.
        consumers: of the weights whose columns are multiplied.
        heads, head_dim, repeats: of the producer's channels, where each head of values is read by
            so many heads of queries; 1 everywhere else.
        unscaled: the producer's first channels that the consumers do not read: gates.
        exact: scales are powers of two, because a consumer keeps its 16-bit numbers.
    """

    producer: str
    consumers: tuple[str, ...]
    heads: int = 1
    head_dim: int = 1
    repeats: int = 1
    unscaled: int = 0
    exact: bool = False

    def to_columns(self, scales: Tensor) -> Tensor:
        """[..., K] of the consumers' columns, of ``scales`` of the producer's channels."""
        if self.repeats == 1:
            return scales[..., self.unscaled :]
        by_head = scales.view(self.heads, self.head_dim)
        return by_head.repeat_interleave(self.repeats, dim=0).flatten()

    def to_channels(self, columns: Tensor) -> Tensor:
        """Of the producer's channels: the mean of the columns [K] that each becomes."""
        if self.repeats == 1:
            return columns
        return columns.view(self.heads, self.repeats, self.head_dim).mean(dim=1).flatten()


def folds_of_layer(layer: LayerSpec, index: int) -> list[Fold]:
    """Where the scales of decoder layer ``index`` go: q, k, v; o; gate, up; down.

    A layer whose values have a bias has no scales for o: the bias would have to be divided too. The
    norm before experts is read by their router too, which stays as it is but for powers of two.
    """
    prefix, mixer = f"layers.{index}.", layer.mixer
    assert isinstance(mixer, AttentionSpec), "calibration refuses recurrent layers"
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    found = [_fold(f"{prefix}input_layernorm", *(f"{attention}{p}_proj" for p in "qkv"))]
    norm = f"{prefix}post_attention_layernorm"
    if isinstance(layer.mlp, SparseMoe):
        assert layer.mlp.shared_expert_width == 0, "calibration knows no shared experts"
        gate_up, down = expert_names(index)
        found += [
            Fold(f"{norm}.weight", (gate_up, f"{mlp}gate.weight"), exact=True),
            Fold(gate_up, (down,), unscaled=layer.mlp.expert_width),
        ]
    else:
        found += [
            _fold(norm, f"{mlp}gate_proj", f"{mlp}up_proj"),
            _fold(f"{mlp}up_proj", f"{mlp}down_proj"),
        ]
    if not mixer.qkv_bias:
        names = f"{attention}v_proj.weight", (f"{attention}o_proj.weight",)
        repeats = mixer.num_heads // mixer.num_kv_heads
        found.append(Fold(*names, mixer.num_kv_heads, mixer.head_dim, repeats))
    return found


def expert_names(index: int) -> tuple[str, str]:
    """Canonical names of the weights [E, 2 I, H] and [E, H, I] of a sparse layer's experts."""
    experts = f"layers.{index}.mlp.experts."
    return f"{experts}gate_up_proj", f"{experts}down_proj"


def _fold(producer: str, *consumers: str) -> Fold:
    return Fold(f"{producer}.weight", tuple(f"{name}.weight" for name in consumers))


@dataclass(frozen=True)
class ChannelScales:
    """Scales of a target; of experts [E, ...].

    ``by_producer``: canonical name of a fold's producer -> float32, one of each of its channels.
    """

    spec: TargetSpec
    by_producer: Mapping[str, Tensor] = field(default_factory=dict)

    def columns(self, name: str) -> Tensor | None:
        """float32 [K]: what the columns of a weight are multiplied by."""
        return self._columns.get(name)

    def rows(self, name: str) -> Tensor | None:
        """float32 [N]: what the rows of a weight, or the numbers of a norm's, are divided by."""
        return self.by_producer.get(name)

    def changes(self, name: str) -> bool:
        """Whether ``scaled`` makes other numbers of this weight."""
        return self.rows(name) is not None or self.columns(name) is not None

    def scaled(self, name: str, values: Tensor) -> Tensor:
        """A weight [..., N, K], or a norm's, with the scales in it."""
        rows, columns = self.rows(name), self.columns(name)
        if columns is not None:
            values = values * columns.to(values.device)[..., None, :]
        if rows is None:
            return values
        own = rows.to(values.device)
        return values / (own[..., None] if values.ndim > 1 else own)

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        return dict(self._pairs())

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        for index, layer in enumerate(self.spec.layers):
            for fold in folds_of_layer(layer, index):
                if fold.producer in self.by_producer:
                    columns = fold.to_columns(self.by_producer[fold.producer])
                    yield from ((name, columns) for name in fold.consumers)


@dataclass(frozen=True)
class Calibration:
    """What calibration found.

    Attributes:
        scales: of the target's channels. weights: canonical name of a weight -> its tensors on
            disk, by the last part of their names, quantised with the scales in it.
        k_amax, v_amax: float32 [layers, kv heads]: the largest absolute key and value of each head,
            with the scales in it.
        num_prompts, num_tokens: that it was made of.
        experts_without_data: experts that too few rows went through to make weights of.
    """

    scales: ChannelScales
    weights: Mapping[str, Mapping[str, TensorRef]]
    k_amax: Tensor
    v_amax: Tensor
    num_prompts: int
    num_tokens: int
    experts_without_data: int = 0

    def kv_scales(self) -> dict[int, KVScales]:
        """By layer and head: twice what was seen is the largest that FP8 holds. The room costs next
        to nothing, as e4m3 is as exact for small numbers; a number beyond is cut off.
        """
        k, v = (
            _HEADROOM * amax.clamp(min=_LEAST) / LARGEST_FP8 for amax in (self.k_amax, self.v_amax)
        )
        pairs = zip(k.tolist(), v.tolist(), strict=True)
        return {i: KVScales(tuple(own_k), tuple(own_v)) for i, (own_k, own_v) in enumerate(pairs)}
