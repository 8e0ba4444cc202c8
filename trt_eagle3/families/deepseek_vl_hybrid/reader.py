"""Read a DeepSeek-VL checkpoint with two towers and check it against its tensors."""

from __future__ import annotations

from dataclasses import replace

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import quote
from trt_eagle3.families.deepseek_vl.reader import check_kind, read_tower, siglip_spec
from trt_eagle3.families.deepseek_vl.tower import siglip_of
from trt_eagle3.families.deepseek_vl_hybrid.sam import (
    Sam,
    hybrid_shapes,
    patch_channels,
)

__all__ = ["read_hybrid"]

_SECTION = "high_res_vision_config"


def read_hybrid(config: ModelConfig) -> TargetCheckpoint:
    """Read a DeepSeek-VL checkpoint with a SigLIP tower and a SAM tower.

    Raises:
        UserError: its kind is not supported, a tower is missing, or its tensors do not fit.
    """
    check_kind(config, "DeepSeek-VL hybrid", "DeepseekVLHybridForConditionalGeneration", _SECTION)
    siglip, sam = siglip_spec(config), _sam(config)
    if siglip.out_hidden_size % 2:
        raise config.error(
            f"text_config.hidden_size: expected an even number, a half for each tower, got "
            f"{siglip.out_hidden_size}"
        )
    image = siglip_of(siglip).side * siglip.patch_size
    vision = replace(
        siglip,
        in_channels=patch_channels(image, sam.image),
        own={**siglip.own, **sam.to_own()},
    )
    depth = max(siglip.depth, sam.depth)
    return read_tower(config, "deepseek_vl_hybrid", vision, depth, hybrid_shapes)


def _sam(config: ModelConfig) -> Sam:
    """Read the SAM tower. Defaults are those of transformers' ``SamVisionConfig``."""

    def whole(key: str, default: int) -> int:
        return config.whole(f"{_SECTION}.{key}", default)

    def flag(key: str) -> bool:
        return bool(config.get(f"{_SECTION}.{key}", "flag", True))

    image, patch = whole("image_size", 1024), whole("patch_size", 16)
    width, heads = whole("hidden_size", 768), whole("num_attention_heads", 12)
    depth = whole("num_hidden_layers", 12)
    ratio = config.get(f"{_SECTION}.mlp_ratio", "number", 4.0)
    blocks = config.get(f"{_SECTION}.global_attn_indexes", "wholes", [2, 5, 8, 11])
    if image % patch or width % heads:
        raise config.error(
            f"{_SECTION}: expected whole patches of {patch} pixels in image_size {image}, and "
            f"{heads} equal heads in hidden_size {width}"
        )
    if not blocks or not 0 <= blocks[0] < depth:
        raise config.error(
            f"{_SECTION}.global_attn_indexes: expected a first block below {depth}, whose output "
            f"is projected too, got {quote(blocks, 80)}"
        )
    if (channels := whole("num_channels", 3)) != 3:
        raise config.error(f"{_SECTION}.num_channels: expected 3, got {channels}: not supported")
    return Sam(
        image=image,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        inner=whole("mlp_dim", int(width * ratio)),
        channels=whole("output_channels", 256),
        window=config.whole(f"{_SECTION}.window_size", 14, least=0) or image // patch,
        global_blocks=tuple(blocks),
        kept=blocks[0],
        act=config.get(f"{_SECTION}.hidden_act", "text", "gelu"),
        epsilon=float(config.get(f"{_SECTION}.layer_norm_eps", "number", 1e-6)),
        qkv_bias=flag("qkv_bias"),
        positions=flag("use_abs_pos"),
        relative=flag("use_rel_pos"),
    )
