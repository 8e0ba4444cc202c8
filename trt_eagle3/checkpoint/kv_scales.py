"""KVScales: the divisors of a layer's keys and values before they are rounded to FP8."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite

from trt_eagle3.checkpoint.quantised.scales import check_scale
from trt_eagle3.checkpoint.tensor_index import TensorRef, read_tensor
from trt_eagle3.errors import UserError, clip, quote

__all__ = ["KVScales", "StoredKVScales"]

_NAME = re.compile(r"layers\.(\d+)\.self_attn(?:\.\w+)?\.([kv])_scale")


@dataclass(frozen=True)
class KVScales:
    """Scales of the keys and values of one layer, one per KV head, or one for all heads.

    A stored number times its scale is the key or value.

    Raises:
        UserError: a scale is missing or not above 0.
    """

    k: tuple[float, ...] = (1.0,)
    v: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for scales in (self.k, self.v):
            if not scales or not all(isfinite(s) and s > 0 for s in scales):
                raise UserError(f"kv_scales: expected scales above 0, got {quote(list(scales))}")

    def by_head(self, num_heads: int, layer: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the scales of keys and of values, one for each of ``num_heads`` heads.

        Raises:
            UserError: their number does not match ``num_heads``.
        """
        for scales in (self.k, self.v):
            if len(scales) not in {1, num_heads}:
                raise UserError(
                    f"kv_scales: layer {layer}: expected 1 or {num_heads} scales, one for each KV "
                    f"head, got {len(scales)}"
                )
        k, v = (s * num_heads if len(s) == 1 else s for s in (self.k, self.v))
        return k, v


@dataclass(frozen=True, eq=False)  # compares as a mapping
class StoredKVScales(Mapping[int, KVScales]):
    """Layer -> scales of a checkpoint, read and checked on first use.

    A missing scale is 1.

    Attributes:
        tensors: canonical name -> place.
        num_layers, num_kv_heads: geometry of the target.
    """

    tensors: Mapping[str, TensorRef]
    num_layers: int
    num_kv_heads: int

    def __getitem__(self, layer: int) -> KVScales:
        return self._values[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def _values(self) -> dict[int, KVScales]:
        return _read(self.tensors, self.num_layers, self.num_kv_heads)


@dataclass
class _Found:
    """The scales of a layer while they are read."""

    k: tuple[float, ...] = (1.0,)
    v: tuple[float, ...] = (1.0,)
    names: list[str] = field(default_factory=list)


def _read(
    tensors: Mapping[str, TensorRef], num_layers: int, num_kv_heads: int
) -> dict[int, KVScales]:
    """Read the scales.

    Raises:
        UserError: scales belong to a missing layer or another geometry, are given twice, or are not
            above 0.
    """
    layers: dict[int, _Found] = {}
    for name, ref in tensors.items():
        match = _NAME.fullmatch(name)
        if name.startswith("visual."):
            raise UserError(
                f"{ref.file}: {clip(ref.name)}: a KV scale in the vision tower, which has no KV "
                "cache. Quantise keys and values of the language model only."
            )
        if match is None or int(match[1]) >= num_layers:
            raise UserError(
                f"{ref.file}: {clip(ref.name)}: expected scales of keys or values of layers 0 to "
                f"{num_layers - 1}. Use the checkpoint's own files alone."
            )
        found, kind = layers.setdefault(int(match[1]), _Found()), match[2]
        if kind in found.names:
            raise UserError(
                f"{ref.file}: {clip(ref.name)}: scales of the {kind} of layer {match[1]} are given "
                "twice. Use the checkpoint's own files alone."
            )
        found.names.append(kind)
        setattr(found, kind, _values(ref, num_kv_heads))
    return {layer: KVScales(found.k, found.v) for layer, found in sorted(layers.items())}


def _values(ref: TensorRef, num_kv_heads: int) -> Sequence[float]:
    check_scale(ref, ref.file.parent)
    values: list[float] = read_tensor(ref).float().flatten().tolist()
    if len(values) not in {1, num_kv_heads}:
        raise UserError(
            f"{ref.file}: {clip(ref.name)}: expected 1 or {num_kv_heads} scales, one for each KV "
            f"head, got {list(ref.shape)}"
        )
    return tuple(values)
