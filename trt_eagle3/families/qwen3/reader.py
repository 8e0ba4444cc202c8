"""Read a Qwen3 checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.families.qwen3.positions import check_full_attention, plain_rope, reach
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers

__all__ = ["read_qwen3"]

_PREFIXES = (("model.", ""), ("lm_head.", "lm_head."))


def read_qwen3(
    config: ModelConfig, family: str, architecture: str, sparse: SparseLayers | None = None
) -> TargetCheckpoint:
    """Read a text-only Qwen3 checkpoint.

    Args:
        architecture: the one that generates text.
        sparse: reads the layers of a mixture of experts.
    Raises:
        UserError: its kind is not supported (sliding window, a classifier), or its tensors do not
            fit.
    """
    decoder = DecoderConfig(config, sparse=sparse)
    _check_kind(config, architecture)
    decoder.check()
    tensors, quantisation = open_weights(config, _PREFIXES)
    if decoder.num_layers > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    # in a mixture of experts all layers slide, or none
    check_full_attention(decoder, first=28 if sparse is None else 0)
    rope = plain_rope(decoder)
    return decoder.checkpoint(
        family,
        decoder.layers(rope),
        tensors,
        max_position_embeddings=reach(decoder, rope),
        quantisation=quantisation,
    )


def _check_kind(config: ModelConfig, architecture: str) -> None:
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, architecture}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3 that generates text ({architecture}), got "
            f"architecture {quote(told, 80)}."
        )
