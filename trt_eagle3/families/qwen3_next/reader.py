"""Read a Qwen3-Next checkpoint, and check its tensors.

Its MTP head has a mixture of experts like the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import find_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.families.qwen3.reader import TEXT_PREFIXES
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3_5.decoder import MTP, HybridConfig
from trt_eagle3.spec import GatedDeltaSpec, LayerSpec, RopeSpec

__all__ = ["read_qwen3_next"]

_ARCHITECTURE = "Qwen3NextForCausalLM"
_SPARSE = SparseLayers(always_renormalises=False, by_default=True, shared_expert=True)
_FUSED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}


def read_qwen3_next(config: ModelConfig) -> TargetCheckpoint:
    """Read a Qwen3-Next checkpoint.

    Raises:
        UserError: its kind is not supported (sliding window, a classifier, a scaled rope), or its
            tensors do not fit.
    """
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, _ARCHITECTURE}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3-Next that generates text ({_ARCHITECTURE}), "
            f"got architecture {quote(told, 80)}."
        )
    decoder = _FusedConfig(config, sparse=_SPARSE)
    decoder.check()
    rope, rotary_dim = decoder.rotary()
    stored = find_weights(config, TEXT_PREFIXES)
    tensors, quantisation = stored.without(MTP).read()
    if decoder.num_layers > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    decoder.check_layer_types(tensors)
    assert rope.base is not None, "rotary() checks it"
    layers = decoder.layers(RopeSpec.plain(rotary_dim, rope.base))
    decoder.check_fused(layers, tensors)
    target = decoder.checkpoint(
        "qwen3_next",
        layers,
        tensors,
        max_position_embeddings=decoder.max_position_embeddings,
        quantisation=quantisation,
    )
    return replace(target, mtp=decoder.mtp_head(layers, stored.only(MTP)))


@dataclass(frozen=True)
class _FusedConfig(HybridConfig):
    """The decoder of a config. The projections of linear attention are fused by key head."""

    def check(self) -> None:
        """Check that this program can compute the decoder."""
        super().check()
        if self.config.get("use_sliding_window", "flag", False):
            raise self.config.error(
                "use_sliding_window: expected false, got true: not supported. Set it to false only "
                "if the checkpoint was trained without it."
            )

    def check_fused(self, layers: Sequence[LayerSpec], tensors: Mapping[str, TensorRef]) -> None:
        """Check the rows of the fused projections against the head counts.

        Raises:
            UserError: they differ. The message has the counts.
        """
        delta = self._delta()
        for name, expected in self.shapes(layers, tied_head=True).items():
            found = tensors[name].shape if name in tensors else expected
            if name.split(".")[-2] in _FUSED and found != expected:
                raise self.config.error(
                    f"{clip(name)}: expected shape {list(expected)} for {delta.num_k_heads} key "
                    f"heads of {delta.key_dim} and {delta.num_v_heads} value heads of "
                    f"{delta.value_dim}, got {list(found)}. Correct linear_num_key_heads, "
                    "linear_num_value_heads or the head sizes."
                )

    def shapes(self, layers: Sequence[LayerSpec], tied_head: bool) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape of every tensor of the decoder and its head."""
        shapes = super().shapes(layers, tied_head)
        for i, layer in enumerate(layers):
            if isinstance(layer.mixer, GatedDeltaSpec):
                prefix = f"layers.{i}.linear_attn."
                for fused, parts in _FUSED.items():
                    rows = sum(shapes.pop(f"{prefix}{part}.weight")[0] for part in parts)
                    shapes[f"{prefix}{fused}.weight"] = (rows, self.hidden_size)
        return shapes

    def _delta(self) -> GatedDeltaSpec:
        return replace(super()._delta(), interleaved=True)
