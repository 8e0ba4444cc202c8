"""Read a Qwen3-VL checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from trt_eagle3.checkpoint.model_config import ModelConfig, checked_token_id, mark_token_id
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.rope_schedule import read_rope_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import Prefixes
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3_vl.tensors import PREFIXES, vision_shapes
from trt_eagle3.spec import LayerSpec, RopeSpec, VisionSpec

__all__ = ["PADS", "read_qwen3_vl", "vision_spec"]

PADS = (151655, 151656)
"""Default tokens of images and of videos in configs of Qwen2.5-VL and Qwen3-VL."""

_LEVELS = (8, 16, 24)  # transformers' default
_SECTIONS = ("", "text_config.")


def read_qwen3_vl(
    config: ModelConfig,
    family: str,
    architecture: str,
    sparse: SparseLayers | None = None,
    prefixes: Prefixes = PREFIXES,
    own: Mapping[str, int] | None = None,
) -> TargetCheckpoint:
    """Read a Qwen3-VL checkpoint.

    Args:
        architecture: the one that generates text.
        sparse: reads the layers of a mixture of experts.
        prefixes: prefixes of its tensors.
        own: ``VisionSpec.own`` of its tower.
    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    decoder = DecoderConfig(config, "text_config.", sparse)
    _check_kind(config, architecture)
    decoder.check()
    rope = _rope(config, decoder.head_dim)
    vision = replace(vision_spec(config, decoder, _LEVELS), own=own or {})
    tensors, quantisation = open_weights(config, prefixes, _SECTIONS)
    if max(decoder.num_layers, vision.depth) > len(tensors):
        raise config.error(
            f"{decoder.num_layers} decoder layers and {vision.depth} vision blocks, "
            f"{len(tensors)} tensors"
        )
    layers = _layers(decoder, rope, len(vision.level_blocks))
    return decoder.checkpoint(
        family,
        layers,
        tensors,
        max_position_embeddings=decoder.max_position_embeddings,
        quantisation=quantisation,
        vision=vision,
        vision_shapes=vision_shapes(vision),
    )


def _check_kind(config: ModelConfig, architecture: str) -> None:
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, architecture}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3-VL ({architecture}), got architecture "
            f"{quote(told, 80)}."
        )
    for section in ("text_config", "vision_config"):
        if not config.get(section, "object"):
            raise config.error(f"{section}: expected an object, got none")


def _layers(decoder: DecoderConfig, rope: RopeSpec, num_levels: int) -> tuple[LayerSpec, ...]:
    """Build the layers. The first ones receive the visual levels."""
    layers = decoder.layers(rope)
    first = tuple(replace(layer, visual_level=i) for i, layer in enumerate(layers[:num_levels]))
    return first + layers[num_levels:]


def _rope(config: ModelConfig, head_dim: int) -> RopeSpec:
    """Read ``rope_parameters`` (transformers 5), or ``rope_scaling`` and ``rope_theta`` (4.57)."""
    rope = read_rope_config(config.get("text_config", "object"), config.file)
    if rope.base is None or rope.base <= 1:
        raise config.error(
            f"text_config.rope_theta: expected a number above 1, got {rope.base} (if it is "
            "absent, transformers 4.57 uses 5e6 and 5.x 5e5). Write the one it was trained with."
        )
    kind = rope.kind()
    # 4.57 writes "mrope" in some configs; both mean the unscaled schedule
    if kind not in {"default", "mrope"}:
        raise config.error(
            f"text_config rope_type: expected default, got {quote(kind)}: not supported"
        )
    return rope.unscaled(head_dim, (24, 20, 20))


def vision_spec(
    config: ModelConfig,
    decoder: DecoderConfig,
    level_blocks: tuple[int, ...],
    pads: tuple[int, int] = PADS,
) -> VisionSpec:
    """Read the tower of ``vision_config``.

    Args:
        level_blocks: default of transformers' config class.
        pads: default tokens of images and of videos.
    Raises:
        UserError: sizes do not fit each other or the decoder.
    """
    pad_id = partial(checked_token_id, config, decoder.vocab_size)
    mark_id = partial(mark_token_id, config, decoder.vocab_size)
    spec = VisionSpec(
        depth=config.whole("vision_config.depth"),
        hidden_size=config.whole("vision_config.hidden_size"),
        intermediate_size=config.whole("vision_config.intermediate_size"),
        num_heads=config.whole("vision_config.num_heads"),
        in_channels=config.whole("vision_config.in_channels", 3),
        patch_size=config.whole("vision_config.patch_size", 16),
        temporal_patch_size=config.whole("vision_config.temporal_patch_size", 2),
        spatial_merge_size=config.whole("vision_config.spatial_merge_size", 2),
        out_hidden_size=config.whole("vision_config.out_hidden_size"),
        num_position_embeddings=config.whole("vision_config.num_position_embeddings", 2304),
        level_blocks=tuple(
            config.get("vision_config.deepstack_visual_indexes", "wholes", level_blocks)
        ),
        hidden_act=config.get("vision_config.hidden_act", "text", "gelu_pytorch_tanh"),
        image_token_id=pad_id("image_token_id", pads[0]),
        video_token_id=pad_id("video_token_id", pads[1]),
        vision_start_token_id=mark_id("vision_start_token_id"),
        vision_end_token_id=mark_id("vision_end_token_id"),
    )
    levels, theta = (
        spec.level_blocks,
        config.get("vision_config.rope_parameters.rope_theta", "number", 1e4),
    )
    problems = {
        f"out_hidden_size {spec.out_hidden_size} "
        f"is not the decoder's hidden_size {decoder.hidden_size}": (
            spec.out_hidden_size != decoder.hidden_size
        ),
        f"hidden_size {spec.hidden_size} "
        f"is not {spec.num_heads} heads of a multiple of 4 channels": (
            spec.hidden_size % (4 * spec.num_heads) != 0
        ),
        f"num_position_embeddings {spec.num_position_embeddings} is not a square": (
            round(spec.num_position_embeddings**0.5) ** 2 != spec.num_position_embeddings
        ),
        f"deepstack_visual_indexes {quote(list(levels))} are not distinct blocks of {spec.depth}": (
            len(set(levels)) != len(levels) or not all(i < spec.depth for i in levels)
        ),
        f"{len(levels)} deepstack levels for {decoder.num_layers} decoder layers": len(levels)
        > decoder.num_layers,
        f"rope_theta {theta:g} is not 10000, the only one supported": theta != 1e4,
    }
    for problem, found in problems.items():
        if found:
            raise config.error(f"vision_config: {problem}")
    return spec
