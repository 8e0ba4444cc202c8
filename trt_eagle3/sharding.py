"""Which part of a model each rank of a tensor-parallel engine holds.

A rank holds whole heads of attention and of gated delta nets, a slice of the width of each MLP and
of each expert, and rows of the head. What does not divide is replicated: every rank computes it
whole, which is exact. ``graph/shard.py`` cuts a graph by these rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trt_eagle3.spec import (
    AttentionSpec,
    DenseMlp,
    GatedDeltaSpec,
    LayerSpec,
    SparseMoe,
    TargetSpec,
)

__all__ = ["Range", "Shard", "rank_spec", "replicated_parts"]

Range = tuple[int, int]
"""First and end index."""


@dataclass(frozen=True)
class Shard:
    """The part of ``rank`` among ``size`` ranks."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def even(self, count: int) -> Range | None:
        """Return this rank's share of ``count`` items; None if the shares are not equal."""
        each = count // self.size
        return None if count % self.size else (self.rank * each, (self.rank + 1) * each)

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Range, Range] | None:
        """Return the heads and the KV heads of this rank; None if they do not divide.

        With fewer KV heads than ranks, several ranks hold the same KV head. In a gated delta net
        the heads are those of the values, and the KV heads those of the keys.
        """
        query, kv = self.even(num_heads), self.even(num_kv_heads)
        if query is None:
            return None
        if kv is None and self.size % num_kv_heads == 0:
            head = self.rank * num_kv_heads // self.size
            kv = (head, head + 1)
        return None if kv is None else (query, kv)

    def width(self, count: int, block: int = 1) -> Range | None:
        """Return this rank's slice of an inner width; None if it is narrower than the ranks.

        The slices begin at multiples of ``block`` (a quantised weight's group) if there are enough
        of them, even if they are then not equal.
        """
        unit = block if count % block == 0 and count // block >= self.size else 1
        units = count // unit
        if units < self.size:
            return None
        first, end = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return first, end


def rank_spec(spec: TargetSpec, size: int) -> TargetSpec:
    """Return a target with the geometry that rank 0 of ``size`` holds, for estimates of memory.

    The vision tower, the hidden size and the vocabulary stay whole.
    """
    if size == 1:
        return spec
    shard = Shard(0, size)
    return replace(spec, layers=tuple(_rank_layer(layer, shard) for layer in spec.layers))


def replicated_parts(spec: TargetSpec, size: int) -> list[str]:
    """Describe the parts that every rank holds whole because they do not divide; often none."""
    shard, found = Shard(0, size), dict[str, None]()
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec):
            if shard.heads(mixer.num_heads, mixer.num_kv_heads) is None:
                what = f"{mixer.num_heads} heads and {mixer.num_kv_heads} KV heads"
                found[f"attention ({what})"] = None
        elif shard.heads(mixer.num_v_heads, mixer.num_k_heads) is None:
            what = f"{mixer.num_k_heads} key heads and {mixer.num_v_heads} value heads"
            found[f"gated delta nets ({what})"] = None
    if shard.even(spec.vocab_size) is None:
        found[f"head (vocabulary of {spec.vocab_size})"] = None
    return list(found)


def _rank_layer(layer: LayerSpec, shard: Shard) -> LayerSpec:
    mixer = layer.mixer
    if isinstance(mixer, AttentionSpec):
        heads = shard.heads(mixer.num_heads, mixer.num_kv_heads)
        if heads is not None:
            query, kv = map(_length, heads)
            mixer = replace(mixer, num_heads=query, num_kv_heads=kv)
    else:
        mixer = _rank_delta(mixer, shard)
    mlp = layer.mlp
    if isinstance(mlp, DenseMlp):
        mlp = DenseMlp(_width(mlp.intermediate_size, shard))
    else:
        mlp = _rank_experts(mlp, shard)
    return replace(layer, mixer=mixer, mlp=mlp)


def _rank_delta(mixer: GatedDeltaSpec, shard: Shard) -> GatedDeltaSpec:
    heads = shard.heads(mixer.num_v_heads, mixer.num_k_heads)
    if heads is None:
        return mixer
    values, keys = map(_length, heads)
    return replace(mixer, num_k_heads=keys, num_v_heads=values)


def _rank_experts(mlp: SparseMoe, shard: Shard) -> SparseMoe:
    shared = mlp.shared_expert_width
    return replace(
        mlp,
        expert_width=_width(mlp.expert_width, shard),
        shared_expert_width=_width(shared, shard) if shared else 0,
    )


def _width(count: int, shard: Shard) -> int:
    taken = shard.width(count)
    return count if taken is None else _length(taken)


def _length(taken: Range) -> int:
    return taken[1] - taken[0]
