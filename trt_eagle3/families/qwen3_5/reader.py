"""Read a Qwen3.5 checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from dataclasses import replace

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import find_weights
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3_5.decoder import MTP, HybridConfig
from trt_eagle3.families.qwen3_vl.reader import vision_spec
from trt_eagle3.families.qwen3_vl.tensors import PREFIXES, vision_shapes
from trt_eagle3.spec import VisionSpec

__all__ = ["read_qwen3_5"]

_SECTION = "text_config."
_TOWER = "visual."  # a text-only use of a checkpoint does not read it; transformers skips it too
_PADS = (248056, 248057)  # transformers' tokens of images and of videos
_SECTIONS = (11, 11, 10)  # and its default mrope_section


def read_qwen3_5(
    config: ModelConfig, family: str, architecture: str, sparse: SparseLayers | None = None
) -> TargetCheckpoint:
    """Read a Qwen3.5 checkpoint. A text-only one has the family ``<family>_text``.

    Args:
        architecture: prefix of its architectures' names.
        sparse: reads the layers of a mixture of experts.
    Raises:
        UserError: its kind is not supported, or its tensors do not fit.
    """
    if _is_text(config, architecture):
        section = _SECTION if config.get(_SECTION[:-1], "object") else ""
        return _read(HybridConfig(config, section, sparse), f"{family}_text", None)
    for section in ("text_config", "vision_config"):
        if not config.get(section, "object"):
            raise config.error(f"{section}: expected an object, got none")
    decoder = HybridConfig(config, _SECTION, sparse)
    return _read(decoder, family, vision_spec(config, decoder, (), _PADS))


def _is_text(config: ModelConfig, architecture: str) -> bool:
    """Return whether it is text-only, by its type or its architecture.

    Raises:
        UserError: its architecture does not generate text.
    """
    told = (config.get("architectures", "texts") or [None])[0]
    text, whole = (f"{architecture}For{end}" for end in ("CausalLM", "ConditionalGeneration"))
    by_type = config.get("model_type", "text", "").endswith("_text")
    known = (text,) if by_type else (whole, text)
    if told not in {None, *known}:
        raise UserError(
            f"{config.file.parent}: expected a Qwen3.5 ({' or '.join(known)}), got architecture "
            f"{quote(told, 80)}."
        )
    return bool(by_type or told == text)


def _read(decoder: HybridConfig, family: str, vision: VisionSpec | None) -> TargetCheckpoint:
    config = decoder.config
    decoder.check()
    rotated, rotary_dim = decoder.rotary()
    rope = rotated.unscaled(rotary_dim, _SECTIONS)
    stored = find_weights(config, PREFIXES, ("", _SECTION))
    own = stored.without(MTP)
    tensors, quantisation = (own if vision else own.without(_TOWER)).read()
    if max(decoder.num_layers, vision.depth if vision else 0) > len(tensors):
        raise config.error(f"{decoder.num_layers} decoder layers, {len(tensors)} tensors")
    decoder.check_layer_types(tensors)
    layers = decoder.layers(rope)
    target = decoder.checkpoint(
        family,
        layers,
        tensors,
        max_position_embeddings=decoder.max_position_embeddings,
        quantisation=quantisation,
        vision=vision,
        vision_shapes=vision_shapes(vision) if vision else None,
    )
    return replace(target, mtp=decoder.mtp_head(layers, stored.only(MTP)))
