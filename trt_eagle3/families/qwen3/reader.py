"""Reading a dense Qwen3 checkpoint: its config in every spelling, checked against its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.spec import RopeSpec

__all__ = ["read_qwen3"]

_ARCHITECTURE = "Qwen3ForCausalLM"
_PREFIXES = (("model.", ""), ("lm_head.", "lm_head."))


def read_qwen3(config: ModelConfig) -> TargetCheckpoint:
    """Read a dense text-only Qwen3 checkpoint.

    Raises:
        UserError: another kind of it (sliding window, a classifier), or tensors that do not fit.
    """
    decoder = DecoderConfig(config)
    _check_kind(config)
    decoder.check()
    tensors, quantisation = open_weights(config, _PREFIXES)
    if decoder.num_layers > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    decoder.check_full_attention()
    rope = _rope(config, decoder)
    layers = (decoder.layer(rope),) * decoder.num_layers
    return decoder.checkpoint(
        "qwen3",
        layers,
        tensors,
        max_position_embeddings=_positions(decoder, rope),
        quantisation=quantisation,
    )


def _check_kind(config: ModelConfig) -> None:
    architecture = (config.get("architectures", "texts") or [None])[0]
    if architecture not in {None, _ARCHITECTURE}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3 that generates text ({_ARCHITECTURE}), got "
            f"architecture {quote(architecture, 80)}."
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
