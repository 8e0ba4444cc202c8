"""Read an InternVL checkpoint in transformers' layout and check it against its tensors."""

from __future__ import annotations

from typing import Any

from trt_eagle3.checkpoint.model_config import ModelConfig, checked_token_id
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.internvl.tower import Tiles, vision_shapes
from trt_eagle3.families.qwen2.decoder import Qwen2Decoder
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.families.qwen3.positions import check_full_attention, plain_rope, reach
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.spec import VisionSpec

__all__ = ["read_internvl"]

_ARCHITECTURE = "InternVLForConditionalGeneration"
_SECTIONS = ("", "text_config.")
# transformers 4.56 and later, then older versions
_PREFIXES = (
    ("model.language_model.", ""),
    ("model.vision_tower.", "visual."),
    ("model.multi_modal_projector.", "visual.projector."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", ""),
    ("vision_tower.", "visual."),
    ("multi_modal_projector.", "visual.projector."),
    ("lm_head.", "lm_head."),
)
_NORMS = {"layer_norm": False, "rms_norm": True}
_LANGUAGE_MODELS = ("qwen2", "qwen3", "qwen3_moe")


def read_internvl(config: ModelConfig) -> TargetCheckpoint:
    """Read an InternVL checkpoint whose language model is a Qwen2, Qwen3 or Qwen3-MoE.

    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    _check_kind(config)
    decoder = _decoder(config)
    decoder.check()
    vision = _vision_spec(config, decoder)
    tensors, quantisation = open_weights(config, _PREFIXES, _SECTIONS)
    if max(decoder.num_layers, vision.depth) > len(tensors):
        raise config.error(
            f"{decoder.num_layers} decoder layers and {vision.depth} vision blocks, "
            f"{len(tensors)} tensors"
        )
    # in a mixture of experts all layers slide, or none
    check_full_attention(decoder, first=28 if decoder.sparse is None else 0)
    rope = plain_rope(decoder)
    return decoder.checkpoint(
        "internvl",
        decoder.layers(rope),
        tensors,
        max_position_embeddings=reach(decoder, rope),
        quantisation=quantisation,
        vision=vision,
        vision_shapes=vision_shapes(vision),
    )


def _language_model(config: ModelConfig) -> str:
    """Return the ``model_type`` of the language model."""
    return str(config.get("text_config.model_type", "text", "qwen2"))


def _decoder(config: ModelConfig) -> DecoderConfig:
    section = "text_config."
    match _language_model(config):
        case "qwen2":
            return Qwen2Decoder(config, section)
        case "qwen3_moe":
            return DecoderConfig(config, section, SparseLayers(always_renormalises=False))
        case _:
            return DecoderConfig(config, section)


def _check_kind(config: ModelConfig) -> None:
    architecture = (config.get("architectures", "texts") or [None])[0]
    if architecture not in {None, _ARCHITECTURE}:
        raise UserError(
            f"{config.file.parent}: expected an InternVL ({_ARCHITECTURE}), got architecture "
            f"{quote(architecture, 80)}."
        )
    for section in ("text_config", "vision_config"):
        if not config.get(section, "object"):
            raise config.error(f"{section}: expected an object, got none")
    language = _language_model(config)
    if language not in _LANGUAGE_MODELS:
        raise config.error(
            f"text_config.model_type: expected {', '.join(_LANGUAGE_MODELS)}, got "
            f"{quote(language, 80)}: not supported. Use an InternVL3 or InternVL3.5 whose language "
            "model is one of these."
        )
    wanted: dict[str, tuple[Any, Any]] = {
        "vision_feature_layer": (-1, -1),
        "vision_feature_select_strategy": ("default", "default"),
        "vision_config.use_absolute_position_embeddings": (True, True),
        "vision_config.use_mask_token": (False, False),
    }
    for key, (value, default) in wanted.items():
        found = config.get(key, "any", default)
        if found != value:
            raise config.error(f"{key}: expected {value}, got {quote(found, 80)}: not supported")


def _vision_spec(config: ModelConfig, decoder: DecoderConfig) -> VisionSpec:
    image, patch = _square(config, "image_size", 448), _square(config, "patch_size", 14)
    merge = _merge_size(config)
    if image % (patch * merge):
        raise config.error(
            f"vision_config.image_size: expected whole tokens of {merge} patches of {patch} "
            f"pixels, got {image}"
        )
    token = checked_token_id(config, decoder.vocab_size, "image_token_id", 151667)
    own = _tiles(config, image // patch)
    spec = VisionSpec(
        depth=config.whole("vision_config.num_hidden_layers", 24),
        hidden_size=config.whole("vision_config.hidden_size", 1024),
        intermediate_size=config.whole("vision_config.intermediate_size", 4096),
        num_heads=config.whole("vision_config.num_attention_heads", 16),
        in_channels=config.whole("vision_config.num_channels", 3),
        patch_size=patch,
        temporal_patch_size=1,
        spatial_merge_size=merge,
        out_hidden_size=decoder.hidden_size,
        num_position_embeddings=own.num_patches,
        level_blocks=(),
        hidden_act=config.get("vision_config.hidden_act", "text", "gelu"),
        image_token_id=token,
        video_token_id=token,
        own=own.to_own(),
    )
    if spec.hidden_size % (4 * spec.num_heads):
        raise config.error(
            f"vision_config: hidden_size {spec.hidden_size} is not {spec.num_heads} heads of a "
            "multiple of 4 channels"
        )
    tokens = config.whole("image_seq_length", own.num_patches // merge**2)
    if tokens * merge**2 != own.num_patches:
        raise config.error(
            f"image_seq_length: expected {own.num_patches // merge**2} by image_size, patch_size "
            f"and downsample_ratio, got {tokens}"
        )
    return spec


def _tiles(config: ModelConfig, side: int) -> Tiles:
    norm = config.get("vision_config.norm_type", "text", "layer_norm")
    if norm not in _NORMS:
        raise config.error(
            f"vision_config.norm_type: expected layer_norm or rms_norm, got {quote(norm, 80)}"
        )
    return Tiles(
        side=side,
        rms=_NORMS[norm],
        epsilon=float(config.get("vision_config.layer_norm_eps", "number", 1e-6)),
        qkv_bias=config.get("vision_config.attention_bias", "flag", False),
        qk_norm=config.get("vision_config.use_qk_norm", "flag", False),
        last_norm=not config.get("vision_config.use_mean_pooling", "flag", True),
        projector_act=config.get("projector_hidden_act", "text", "gelu"),
    )


def _merge_size(config: ModelConfig) -> int:
    """Return the patches along a side of a token: one over ``downsample_ratio``."""
    ratio = float(config.get("downsample_ratio", "number", 0.5))
    if not 0 < ratio <= 1 or round(1 / ratio) * ratio != 1:
        raise config.error(f"downsample_ratio: expected one over a whole number, got {ratio:g}")
    return round(1 / ratio)


def _square(config: ModelConfig, key: str, default: int) -> int:
    """Return a side in pixels, which the config may give for both sides."""
    name = f"vision_config.{key}"
    if not isinstance(config.get(name, "any"), list):
        return config.whole(name, default)
    sides = config.get(name, "wholes")
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise config.error(f"{name}: expected a square, got {quote(sides, 80)}: not supported")
    return int(sides[0])
