"""Read a Qwen3.5 checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trt_eagle3.checkpoint.config_value import config_value
from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import StoredWeights, find_weights
from trt_eagle3.checkpoint.rope_schedule import read_rope_config
from trt_eagle3.checkpoint.target import MtpHead, TargetCheckpoint
from trt_eagle3.errors import UserError, quote
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3_5.decoder import HybridConfig
from trt_eagle3.families.qwen3_vl.reader import vision_spec
from trt_eagle3.families.qwen3_vl.tensors import PREFIXES, vision_shapes
from trt_eagle3.spec import AttentionSpec, LayerSpec, RopeSpec, VisionSpec

__all__ = ["read_qwen3_5"]

_SECTION = "text_config."
# parts that some uses of a checkpoint do not read; transformers also skips them
_HEAD, _TOWER = "mtp.", "visual."
_PART = "partial_rotary_factor"
_PADS = (248056, 248057)  # transformers' tokens of images and of videos
_ROTARY = 0.25  # transformers' default partial_rotary_factor
_SECTIONS = (11, 11, 10)  # and mrope_section


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
    rope = _rope(config, decoder)
    stored = find_weights(config, PREFIXES, ("", _SECTION))
    own = stored.without(_HEAD)
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
    return replace(target, mtp=_mtp_head(decoder, layers, stored.only(_HEAD)))


def _mtp_head(
    decoder: HybridConfig, layers: Sequence[LayerSpec], stored: StoredWeights
) -> MtpHead | None:
    """Return the MTP head: a layer of full attention with an MLP like the target's."""
    if not stored.tensors:
        return None
    layer = next(x for x in reversed(layers) if isinstance(x.mixer, AttentionSpec))
    return MtpHead(layer, stored, decoder.config, decoder.section, decoder.fp8_block())


def _without_default(section: Mapping[str, Any], config: ModelConfig) -> Mapping[str, Any]:
    """Remove the section's own ``partial_rotary_factor`` if ``rope_parameters`` has one.

    transformers uses the latter. Version 5.17 writes its default to the former.
    """
    told = config_value(section, f"rope_parameters.{_PART}", "any", config.file)
    return section if told is None else {k: v for k, v in section.items() if k != _PART}


def _rope(config: ModelConfig, decoder: HybridConfig) -> RopeSpec:
    section = config.get(decoder.section[:-1], "object") if decoder.section else config.values
    rope = read_rope_config(_without_default(section, config), config.file)
    where = f"{decoder.section}rope_parameters"
    if rope.base is None or rope.base <= 1:
        raise config.error(f"{where}.rope_theta: expected a number above 1, got {rope.base}")
    if rope.kind() != "default":
        raise config.error(f"{where}: rope_type {quote(rope.kind())}: not supported")
    part = rope.values.get(_PART, _ROTARY)
    turned = 0 if part is None else decoder.head_dim * part
    if not 0 < turned <= decoder.head_dim or turned % 2:
        raise config.error(
            f"{where}.{_PART}: expected an even part of {decoder.head_dim} channels, got {part}"
        )
    return rope.unscaled(int(turned), _SECTIONS)
