"""Read a Qwen3 checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.families.qwen3.positions import check_full_attention, plain_rope, reach
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers

__all__ = ["TEXT_PREFIXES", "read_qwen3", "read_text_target"]

TEXT_PREFIXES = (("model.", ""), ("lm_head.", "lm_head."))
"""Prefixes in a text-only checkpoint -> canonical ones."""


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
    # in a mixture of experts all layers slide, or none
    return read_text_target(
        DecoderConfig(config, sparse=sparse),
        family,
        "Qwen3",
        architecture,
        first_window=28 if sparse is None else 0,
    )


def read_text_target(
    decoder: DecoderConfig,
    family: str,
    title: str,
    architecture: str,
    *,
    first_window: int | None = None,
) -> TargetCheckpoint:
    """Read a text-only checkpoint whose config is that of its decoder.

    Args:
        title: the family's name for messages.
        architecture: the one that generates text.
        first_window: ``first`` of ``check_full_attention``; None: the caller has checked windows.
    Raises:
        UserError: its kind is not supported (sliding window, a classifier), or its tensors do not
            fit.
    """
    config = decoder.config
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, architecture}:
        raise UserError(
            f"{config.file.parent}: expected a {title} that generates text ({architecture}), got "
            f"architecture {quote(told, 80)}."
        )
    decoder.check()
    tensors, quantisation = open_weights(config, TEXT_PREFIXES)
    if decoder.num_layers > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    if first_window is not None:
        check_full_attention(decoder, first_window)
    rope = plain_rope(decoder)
    return decoder.checkpoint(
        family,
        decoder.layers(rope),
        tensors,
        max_position_embeddings=reach(decoder, rope),
        quantisation=quantisation,
    )
