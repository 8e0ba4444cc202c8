"""Reading a dense Qwen3 checkpoint: its config in every spelling, checked against its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig

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
    rope = decoder.rope()
    layers = (decoder.layer(rope),) * decoder.num_layers
    return decoder.checkpoint(
        "qwen3",
        layers,
        tensors,
        max_position_embeddings=decoder.reach(rope),
        quantisation=quantisation,
    )


def _check_kind(config: ModelConfig) -> None:
    architecture = (config.get("architectures", "texts") or [None])[0]
    if architecture not in {None, _ARCHITECTURE}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3 that generates text ({_ARCHITECTURE}), got "
            f"architecture {quote(architecture, 80)}."
        )
