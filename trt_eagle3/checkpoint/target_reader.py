"""Reading a dense Qwen3-VL checkpoint: its config in every spelling, checked against its
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.config_value import Kind, config_value
from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.checkpoint.rope_schedule import read_rope_config
from trt_eagle3.checkpoint.target import TargetSpec, TextSpec, VisionSpec
from trt_eagle3.checkpoint.target_tensors import canonical_tensors, check_tensors, target_shapes
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_index
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.json_file import read_json_object

__all__ = ["read_json", "read_target"]

_MAX_CONFIG_BYTES = 4 << 20  # a quantised one that lists its layers has some 100 KB
_ARCHITECTURE = "Qwen3VLForConditionalGeneration"


def read_target(directory: Path) -> TargetSpec:
    """Read a dense Qwen3-VL checkpoint: its config, and the places of its tensors, which must
    agree.

    Raises:
        UserError: not a Qwen3-VL checkpoint, a kind of it that is not supported, or tensors that
            are missing, surplus, misshapen or quantised, each by name.
    """
    config = _Config(read_json(directory / "config.json"), directory / "config.json")
    _check_kind(config, directory)
    text = _text_spec(config)
    vision = _vision_spec(config, text)
    tensors = canonical_tensors(open_index(directory))
    if max(text.num_layers, vision.depth) > len(tensors):
        raise config.error(
            f"{text.num_layers} decoder layers and {vision.depth} vision blocks, {len(tensors)} "
            "tensors"
        )
    _check_token_ids(config, text.vocab_size)
    tied = _tied_head(config, tensors)
    check_tensors(tensors, target_shapes(text, vision, tied), directory)
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return TargetSpec(
        path=directory,
        text=text,
        vision=vision,
        image_token_id=config.whole("image_token_id", least=0),
        video_token_id=config.whole("video_token_id", least=0),
        vision_start_token_id=config.whole("vision_start_token_id", least=0),
        vision_end_token_id=config.whole("vision_end_token_id", least=0),
        eos_token_ids=_eos_token_ids(directory, config),
        tied_head=tied,
        tensors=tensors,
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: the file is absent or holds something else (see ``json_file``).
    """
    try:
        return read_json_object(file, _MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"{file.parent}: not a checkpoint: it has no {file.name}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot read it: {error.strerror}") from error


@dataclass(frozen=True)
class _Config:
    """A config.json and its place, for messages."""

    values: Mapping[str, Any]
    file: Path

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """The value at a dotted key, or ``default`` where it is absent or null."""
        value = config_value(self.values, key, kind, self.file)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number that must be there, unless there is a default."""
        value = self.get(key, "whole", default)
        if value is None or value < least:
            raise self.error(f"{key}: expected a whole number of at least {least}, got {value}")
        return int(value)

    def error(self, message: str) -> UserError:
        """An error about this file."""
        return UserError(f"{self.file}: {message}")


def _check_kind(config: _Config, directory: Path) -> None:
    model_type = config.get("model_type", "text")
    architecture = (config.get("architectures", "texts") or [None])[0]
    if model_type != "qwen3_vl" or architecture not in {None, _ARCHITECTURE}:
        what = f"model_type {quote(model_type, 80)}, architecture {quote(architecture, 80)}"
        hint = " Mixture-of-experts Qwen3-VL is not supported." if "moe" in str(model_type) else ""
        raise UserError(
            f"{directory}: expected a dense Qwen3-VL ({_ARCHITECTURE}), got {what}.{hint}"
        )
    for key in ("quantization_config", "text_config.quantization_config", "compression_config"):
        quantised = config.get(key, "object")
        if quantised:
            method = quantised.get("quant_method", "unknown")
            raise UserError(
                f"{directory}: quantised by {clip(method)}: not supported. Use the unquantised "
                "checkpoint."
            )


def _text_spec(config: _Config) -> TextSpec:
    for section in ("text_config", "vision_config"):
        if not config.get(section, "object"):
            raise config.error(f"{section}: expected an object, got none")
    act = config.get("text_config.hidden_act", "text", "silu")
    if act != "silu":
        raise config.error(
            f"text_config.hidden_act: expected silu, got {quote(act)}: not supported"
        )
    # transformers' default here, not hidden_size / heads
    head_dim = config.whole("text_config.head_dim", 128)
    num_heads = config.whole("text_config.num_attention_heads")
    num_kv_heads = config.whole("text_config.num_key_value_heads", num_heads)
    if num_heads % num_kv_heads or head_dim % 2 or head_dim > 1 << 16:
        raise config.error(
            f"text_config: {num_heads} heads, {num_kv_heads} key-value heads of {head_dim}: "
            "expected whole groups of heads of an even size"
        )
    epsilon = config.get("text_config.rms_norm_eps", "number", 1e-6)
    if not 0 <= epsilon < 1:
        raise config.error(f"text_config.rms_norm_eps: expected a small number, got {epsilon}")
    return TextSpec(
        hidden_size=config.whole("text_config.hidden_size"),
        intermediate_size=config.whole("text_config.intermediate_size"),
        num_layers=config.whole("text_config.num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.whole("text_config.vocab_size"),
        rms_norm_eps=float(epsilon),
        rope=_rope(config, head_dim),
        max_position_embeddings=config.whole("text_config.max_position_embeddings"),
        attention_bias=config.get("text_config.attention_bias", "flag", False),
    )


def _check_token_ids(config: _Config, vocab_size: int) -> None:
    """Ids that prompts are made of have rows in the token table."""
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        token_id = config.whole(key, least=0)
        if token_id >= vocab_size:
            raise config.error(
                f"{key}: expected an id below the vocabulary's {vocab_size}, got {token_id}"
            )


def _rope(config: _Config, head_dim: int) -> RopeSpec:
    """transformers 5 has ``rope_parameters``; 4.57 has ``rope_scaling`` beside ``rope_theta``."""
    rope = read_rope_config(config.get("text_config", "object"), config.file)
    if rope.base is None or rope.base <= 1:
        raise config.error(
            f"text_config.rope_theta: expected a number above 1, got {rope.base} (where it is "
            "absent, transformers 4.57 takes 5e6 and 5.x 5e5). Write the one it was trained with."
        )
    kind = rope.kind()
    # 4.57 writes "mrope" in some configs; both mean the unscaled schedule
    if kind not in {"default", "mrope"}:
        raise config.error(
            f"text_config rope_type: expected default, got {quote(kind)}: not supported"
        )
    return RopeSpec.plain(head_dim, rope.base, "interleaved", rope.sections or (24, 20, 20))


def _vision_spec(config: _Config, text: TextSpec) -> VisionSpec:
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
        deepstack_layers=tuple(
            config.get("vision_config.deepstack_visual_indexes", "wholes", (8, 16, 24))
        ),
        hidden_act=config.get("vision_config.hidden_act", "text", "gelu_pytorch_tanh"),
    )
    levels, theta = (
        spec.deepstack_layers,
        config.get("vision_config.rope_parameters.rope_theta", "number", 1e4),
    )
    problems = {
        f"out_hidden_size {spec.out_hidden_size} "
        f"is not the decoder's hidden_size {text.hidden_size}": (
            spec.out_hidden_size != text.hidden_size
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
        f"{len(levels)} deepstack levels for {text.num_layers} decoder layers": len(levels)
        > text.num_layers,
        f"rope_theta {theta:g} is not 10000, the only one supported": theta != 1e4,
    }
    for problem, found in problems.items():
        if found:
            raise config.error(f"vision_config: {problem}")
    return spec


def _tied_head(config: _Config, tensors: Mapping[str, TensorRef]) -> bool:
    """The head is tied where the checkpoint has none of its own.

    The flag cannot be trusted: transformers 4.57 takes True where it is absent, 5.x False; it
    stands at the top or in text_config; and where flag and an own head disagree, 5.x uses the head.
    A flag that says untied, with no head, is an incomplete checkpoint.
    """
    if "lm_head.weight" in tensors:
        return False
    flags = [
        config.get(f"{section}tie_word_embeddings", "flag") for section in ("", "text_config.")
    ]
    return flags == [None, None] or True in flags


def _eos_token_ids(directory: Path, config: _Config) -> tuple[int, ...]:
    """The end tokens that transformers' ``generate`` would use; none where no config names one."""
    file = directory / "generation_config.json"
    places = [(config, "eos_token_id"), (config, "text_config.eos_token_id")]
    if file.exists():
        places.insert(0, (_Config(read_json(file), file), "eos_token_id"))
    for place, key in places:
        kind: Kind = (
            "wholes"
            if isinstance(config_value(place.values, key, "any", place.file), list)
            else "whole"
        )
        ids = place.get(key, kind)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
