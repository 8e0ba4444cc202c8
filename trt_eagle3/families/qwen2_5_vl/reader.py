"""Read a Qwen2.5-VL checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from functools import partial

from trt_eagle3.checkpoint.model_config import ModelConfig, checked_token_id, mark_token_id
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen2_5_vl.decoder import Qwen25Decoder
from trt_eagle3.families.qwen2_5_vl.tower import Windows, vision_shapes
from trt_eagle3.families.qwen3.positions import check_full_attention
from trt_eagle3.families.qwen3_vl.reader import PADS
from trt_eagle3.families.qwen3_vl.tensors import PREFIXES
from trt_eagle3.spec import RopeSpec, VisionSpec

__all__ = ["read_qwen2_5_vl"]

_ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
_SECTIONS = ("", "text_config.")
_THETA = 1e6  # default of every transformers version


def read_qwen2_5_vl(config: ModelConfig) -> TargetCheckpoint:
    """Read a Qwen2.5-VL checkpoint.

    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    _check_kind(config)
    # published configs are flat; transformers 4.52 and later write a section
    section = "text_config." if config.get("text_config", "object") else ""
    decoder = Qwen25Decoder(config, section)
    decoder.check()
    vision = _vision_spec(config, decoder)
    rope = _rope(config, decoder)
    tensors, quantisation = open_weights(config, PREFIXES, _SECTIONS)
    if max(decoder.num_layers, vision.depth) > len(tensors):
        raise config.error(
            f"{decoder.num_layers} decoder layers and {vision.depth} vision blocks, "
            f"{len(tensors)} tensors"
        )
    check_full_attention(decoder, first=80)
    return decoder.checkpoint(
        "qwen2_5_vl",
        decoder.layers(rope),
        tensors,
        max_position_embeddings=decoder.max_position_embeddings,
        quantisation=quantisation,
        vision=vision,
        vision_shapes=vision_shapes(vision),
    )


def _check_kind(config: ModelConfig) -> None:
    architecture = (config.get("architectures", "texts") or [None])[0]
    if architecture not in {None, _ARCHITECTURE}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen2.5-VL ({_ARCHITECTURE}), got architecture "
            f"{quote(architecture, 80)}."
        )
    if not config.get("vision_config", "object"):
        raise config.error("vision_config: expected an object, got none")


def _rope(config: ModelConfig, decoder: Qwen25Decoder) -> RopeSpec:
    """Build the rope: the first channel pairs rotate by time, then rows, the last by columns."""
    values = config.get("text_config", "object") if decoder.section else config.values
    rope = read_rope_config(values, config.file)
    kind = rope.kind()
    if kind == "dynamic":
        raise config.error("rope_type dynamic: not supported. Use yarn, or default.")
    try:
        return make_rope(
            "default" if kind == "mrope" else kind,
            _THETA if rope.base is None else rope.base,
            decoder.head_dim,
            layout="chunked",
            sections=rope.sections or (16, 24, 24),
            parameters=rope.values,
            max_positions=decoder.max_position_embeddings,
        )
    except UserError as error:
        raise config.error(str(error)) from error


def _vision_spec(config: ModelConfig, decoder: Qwen25Decoder) -> VisionSpec:
    pad_id = partial(checked_token_id, config, decoder.vocab_size)
    mark_id = partial(mark_token_id, config, decoder.vocab_size)
    blocks = config.get("vision_config.fullatt_block_indexes", "wholes", (7, 15, 23, 31))
    windows = Windows(
        window_size=config.whole("vision_config.window_size", 112),
        full_blocks=tuple(blocks),
        tokens_per_second=config.whole("vision_config.tokens_per_second", 4),
    )
    spec = VisionSpec(
        depth=config.whole("vision_config.depth", 32),
        hidden_size=config.whole("vision_config.hidden_size"),
        intermediate_size=config.whole("vision_config.intermediate_size"),
        num_heads=config.whole("vision_config.num_heads", 16),
        in_channels=config.whole("vision_config.in_channels", 3),
        patch_size=config.whole("vision_config.patch_size", 14),
        temporal_patch_size=config.whole("vision_config.temporal_patch_size", 2),
        spatial_merge_size=config.whole("vision_config.spatial_merge_size", 2),
        out_hidden_size=config.whole("vision_config.out_hidden_size"),
        num_position_embeddings=0,
        level_blocks=(),
        hidden_act=config.get("vision_config.hidden_act", "text", "silu"),
        image_token_id=pad_id("image_token_id", PADS[0]),
        video_token_id=pad_id("video_token_id", PADS[1]),
        vision_start_token_id=mark_id("vision_start_token_id"),
        vision_end_token_id=mark_id("vision_end_token_id"),
        own=windows.to_own(),
    )
    _check_tower(config, spec, windows, decoder)
    return spec


def _check_tower(
    config: ModelConfig, spec: VisionSpec, windows: Windows, decoder: Qwen25Decoder
) -> None:
    theta = config.get("vision_config.rope_parameters.rope_theta", "number", 1e4)
    token = spec.spatial_merge_size * spec.patch_size
    problems = {
        f"out_hidden_size {spec.out_hidden_size} "
        f"is not the decoder's hidden_size {decoder.hidden_size}": (
            spec.out_hidden_size != decoder.hidden_size
        ),
        f"hidden_size {spec.hidden_size} "
        f"is not {spec.num_heads} heads of a multiple of 4 channels": (
            spec.hidden_size % (4 * spec.num_heads) != 0
        ),
        f"hidden_act {quote(spec.hidden_act)} is not silu, the only one supported": (
            spec.hidden_act != "silu"
        ),
        f"window_size {windows.window_size} is no multiple of a token's {token} pixels "
        f"({spec.spatial_merge_size} patches of {spec.patch_size})": (
            windows.window_size % token != 0
        ),
        f"fullatt_block_indexes {quote(list(windows.full_blocks))} "
        f"are not blocks of {spec.depth}": any(i >= spec.depth for i in windows.full_blocks),
        f"rope_theta {theta:g} is not 10000, the only one supported": theta != 1e4,
    }
    for problem, found in problems.items():
        if found:
            raise config.error(f"vision_config: {problem}")
