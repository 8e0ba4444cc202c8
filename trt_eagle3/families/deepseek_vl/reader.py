"""Read a DeepSeek-VL checkpoint in transformers' layout and check it against its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trt_eagle3.checkpoint.model_config import ModelConfig, checked_token_id
from trt_eagle3.checkpoint.quantised.read import open_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import UNREAD
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.deepseek_vl.tower import Siglip, tower_shapes
from trt_eagle3.families.llama.decoder import LlamaDecoder
from trt_eagle3.families.llama.reader import check_llama
from trt_eagle3.families.qwen3.positions import plain_rope, reach
from trt_eagle3.spec import VisionSpec

__all__ = ["check_kind", "read_deepseek_vl", "read_tower", "siglip_spec"]

_SECTIONS = ("", "text_config.")
# transformers 5.x names the tower's parts directly, 4.57 below a second vision_model
_PREFIXES = (
    ("model.language_model.", ""),
    ("model.vision_model.vision_model.head.", UNREAD),
    ("model.vision_model.vision_model.", "visual."),
    ("model.vision_model.head.", UNREAD),
    ("model.vision_model.", "visual."),
    ("model.aligner.", "visual.aligner."),
    ("model.high_res_vision_model.vision_encoder.", "visual.sam."),
    ("model.high_res_vision_neck.", "visual.sam_neck."),
    ("model.high_res_vision_proj.", "visual.sam_proj."),
    ("model.high_res_vision_alpha", "visual.sam_alpha"),
)


class _Decoder(LlamaDecoder):
    """Llama's decoder in ``text_config``."""

    @property
    def tie_sections(self) -> tuple[str, ...]:
        """The top alone: the flag of ``text_config`` is about a head that is not used."""
        return ("",)


def read_deepseek_vl(config: ModelConfig) -> TargetCheckpoint:
    """Read a DeepSeek-VL checkpoint with a SigLIP tower alone.

    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    check_kind(config, "DeepSeek-VL", "DeepseekVLForConditionalGeneration")
    vision = siglip_spec(config)
    return read_tower(config, "deepseek_vl", vision, vision.depth, tower_shapes)


def check_kind(config: ModelConfig, title: str, architecture: str, *others: str) -> None:
    """Check the architecture, and that the config describes each part of the model.

    Args:
        others: sections besides ``text_config`` and ``vision_config``.
    """
    told = (config.get("architectures", "texts") or [None])[0]
    if told not in {None, architecture}:
        raise UserError(
            f"{config.file.parent}: expected a {title} ({architecture}), got architecture "
            f"{quote(told, 80)}."
        )
    kinds = {
        "text_config": "llama",
        "vision_config": "siglip_vision_model",
        "high_res_vision_config": "sam_vision_model",
    }
    for section in ("text_config", "vision_config", *others):
        if not config.get(section, "object"):
            raise config.error(f"{section}: expected an object, got none")
        kind = config.get(f"{section}.model_type", "text", kinds[section])
        if kind != kinds[section]:
            raise config.error(
                f"{section}.model_type: expected {kinds[section]}, got {quote(kind, 80)}: not "
                "supported"
            )


def read_tower(
    config: ModelConfig,
    family: str,
    vision: VisionSpec,
    depth: int,
    shapes_of: Callable[[VisionSpec], Mapping[str, tuple[int, ...]]],
) -> TargetCheckpoint:
    """Read the checkpoint of a tower.

    Args:
        depth: blocks of its deepest part.
        shapes_of: returns the shapes of the tower's tensors.
    Raises:
        UserError: the language model is not supported, or the tensors do not fit.
    """
    decoder = _Decoder(config, "text_config.")
    check_llama(decoder)
    decoder.check()
    tensors, quantisation = open_weights(config, _PREFIXES, _SECTIONS)
    if max(decoder.num_layers, depth) > len(tensors):
        raise config.error(
            f"{decoder.num_layers} decoder layers and {depth} vision blocks, {len(tensors)} tensors"
        )
    rope = plain_rope(decoder)
    return decoder.checkpoint(
        family,
        decoder.layers(rope),
        tensors,
        max_position_embeddings=reach(decoder, rope),
        quantisation=quantisation,
        vision=vision,
        vision_shapes=shapes_of(vision),
    )


def siglip_spec(config: ModelConfig) -> VisionSpec:
    """Read the SigLIP tower. Defaults are those of transformers' ``SiglipVisionConfig``."""
    section = "vision_config"
    image = config.whole(f"{section}.image_size", 224)
    patch = config.whole(f"{section}.patch_size", 16)
    if image % patch:
        raise config.error(
            f"{section}.image_size: expected whole patches of {patch} pixels, got {image}"
        )
    decoder = _Decoder(config, "text_config.")
    token = checked_token_id(config, decoder.vocab_size, "image_token_id", 100015)
    epsilon = float(config.get(f"{section}.layer_norm_eps", "number", 1e-6))
    own = Siglip(image // patch, epsilon)
    spec = VisionSpec(
        depth=config.whole(f"{section}.num_hidden_layers", 12),
        hidden_size=config.whole(f"{section}.hidden_size", 768),
        intermediate_size=config.whole(f"{section}.intermediate_size", 3072),
        num_heads=config.whole(f"{section}.num_attention_heads", 12),
        in_channels=config.whole(f"{section}.num_channels", 3),
        patch_size=patch,
        temporal_patch_size=1,
        spatial_merge_size=1,
        out_hidden_size=decoder.hidden_size,
        num_position_embeddings=own.num_patches,
        level_blocks=(),
        hidden_act=config.get(f"{section}.hidden_act", "text", "gelu_pytorch_tanh"),
        image_token_id=token,
        video_token_id=token,
        own=own.to_own(),
    )
    if spec.in_channels != 3:
        raise config.error(
            f"{section}.num_channels: expected 3, got {spec.in_channels}: not supported"
        )
    if spec.hidden_size % (4 * spec.num_heads):
        raise config.error(
            f"{section}: hidden_size {spec.hidden_size} is not {spec.num_heads} heads of a "
            "multiple of 4 channels"
        )
    return spec
