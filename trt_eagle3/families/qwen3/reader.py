"""Reading a Qwen3 checkpoint: its config in every spelling, checked against its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.spec import RopeSpec

__all__ = ["read_qwen3"]

_PREFIXES = (("model.", ""), ("lm_head.", "lm_head."))


def read_qwen3(
    config: ModelConfig, family: str, architecture: str, sparse: SparseLayers | None = None
) -> TargetCheckpoint:
    """Read a text-only Qwen3 checkpoint.

    Args:
        architecture: the one that generates text. sparse: reads the layers of a mixture of experts.
    Raises:
        UserError: another kind of it (sliding window, a classifier), or tensors that do not fit.
    """
    decoder = DecoderConfig(config, sparse=sparse)
    _check_kind(config, architecture)
    decoder.check()
    tensors, quantisation = open_weights(config, _PREFIXES)
    if decoder.num_layers > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    # in a mixture of experts all layers slide, or none
    _check_full_attention(config, decoder.num_layers, first=28 if sparse is None else 0)
    rope = _rope(config, decoder)
    return decoder.checkpoint(
        family,
        decoder.layers(rope),
        tensors,
        max_position_embeddings=_positions(decoder, rope),
        quantisation=quantisation,
    )


def _check_kind(config: ModelConfig, architecture: str) -> None:
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, architecture}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3 that generates text ({architecture}), got "
            f"architecture {quote(told, 80)}."
        )


def _check_full_attention(config: ModelConfig, num_layers: int, first: int) -> None:
    """Refuse layers that see a window only; without ``layer_types``, transformers lets those from
    ``max_window_layers`` on slide, by default from ``first``.
    """
    slides = config.get("use_sliding_window", "flag", False)
    kinds = config.get("layer_types", "texts", [])
    if kinds and len(kinds) != num_layers:
        raise config.error(f"layer_types: expected {num_layers} of them, got {len(kinds)}")
    windowed = any(kind != "full_attention" for kind in kinds)
    if not kinds:
        windowed = slides and config.whole("max_window_layers", first, least=0) < num_layers
    if windowed:
        raise config.error(
            "sliding window attention (use_sliding_window, layer_types): not supported. Set "
            "use_sliding_window to false only if the checkpoint was trained without it."
        )


def _rope(config: ModelConfig, decoder: DecoderConfig) -> RopeSpec:
    rope = read_rope_config(config.values, config.file)
    if rope.base is None or rope.base <= 1:
        raise config.error(
            f"rope_theta: expected a number above 1, got {rope.base}. Write the one it was trained "
            "with."
        )
    if rope.kind() == "dynamic":
        raise config.error("rope_type dynamic: not supported. Use yarn, or no rope_scaling.")
    try:
        return make_rope(
            rope.kind(),
            rope.base,
            decoder.head_dim,
            parameters=rope.values,
            max_positions=decoder.max_position_embeddings,
        )
    except UserError as error:
        raise config.error(str(error)) from error


def _positions(decoder: DecoderConfig, rope: RopeSpec) -> int:
    """Positions that the rope reaches: with yarn, its factor times the original ones."""
    trained = decoder.max_position_embeddings
    if rope.kind != "yarn":
        return trained
    numbers = rope.parameters
    return max(trained, int(numbers["factor"] * numbers["original_max_position_embeddings"]))
