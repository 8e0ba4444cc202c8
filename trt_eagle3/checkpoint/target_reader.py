"""Reading a dense Qwen3-VL checkpoint: its config in every spelling, checked against its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.checkpoint.target import TargetSpec, TextSpec, VisionSpec
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_index
from trt_eagle3.errors import UserError

__all__ = ["check_tensors", "read_json", "read_target", "target_shapes"]

_ARCHITECTURE = "Qwen3VLForConditionalGeneration"
_FLOATS = ("F32", "F16", "BF16")

# Checkpoint prefix -> canonical prefix, the first that fits: transformers 4.57 and 5.x, then what older tools wrote.
_PREFIXES = (
    ("model.language_model.", ""),
    ("model.visual.", "visual."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", ""),
    ("visual.", "visual."),
    ("lm_head.", "lm_head."),
    ("model.", ""),
)


def read_target(directory: Path) -> TargetSpec:
    """Read a dense Qwen3-VL checkpoint: its config, and the places of its tensors, which must agree.

    Raises:
        UserError: not a Qwen3-VL checkpoint, a kind of it that is not supported, or tensors that are missing, surplus,
            misshapen or quantised, each by name.
    """
    config = read_json(directory / "config.json")
    _check_kind(config, directory)
    text = _text_spec(config)
    vision = _vision_spec(_section(config, "vision_config"), text)
    tensors = _canonical(open_index(directory))
    tied = _tied_head(config, tensors)
    check_tensors(tensors, target_shapes(text, vision, tied), directory)
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    return TargetSpec(
        path=directory,
        text=text,
        vision=vision,
        image_token_id=_int(config, "image_token_id"),
        video_token_id=_int(config, "video_token_id"),
        vision_start_token_id=_int(config, "vision_start_token_id"),
        vision_end_token_id=_int(config, "vision_end_token_id"),
        eos_token_ids=_eos_token_ids(directory, config),
        tied_head=tied,
        tensors=tensors,
    )


def target_shapes(text: TextSpec, vision: VisionSpec, tied_head: bool) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor of a checkpoint of this geometry."""
    hidden, q, kv = text.hidden_size, text.num_heads * text.head_dim, text.num_kv_heads * text.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (text.vocab_size, hidden), "norm.weight": (hidden,)}
    if not tied_head:
        shapes["lm_head.weight"] = (text.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (text.head_dim,),
        "self_attn.k_norm.weight": (text.head_dim,),
        "mlp.gate_proj.weight": (text.intermediate_size, hidden),
        "mlp.up_proj.weight": (text.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, text.intermediate_size),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if text.attention_bias:
        layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", hidden))}
    for i in range(text.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes | _vision_shapes(vision)


def _vision_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    width, inner = vision.hidden_size, vision.intermediate_size
    wide = width * vision.spatial_merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {"visual.pos_embed.weight": (vision.num_position_embeddings, width)}

    def linear(name: str, out: int, *rest: int) -> None:
        shapes[f"visual.{name}.weight"] = (out, *rest)
        shapes[f"visual.{name}.bias"] = (out,)

    def merger(name: str, norm: int) -> None:
        linear(f"{name}.norm", norm)
        linear(f"{name}.linear_fc1", wide, wide)
        linear(f"{name}.linear_fc2", vision.out_hidden_size, wide)

    linear("patch_embed.proj", width, *patch)
    for i in range(vision.depth):
        linear(f"blocks.{i}.norm1", width)
        linear(f"blocks.{i}.norm2", width)
        linear(f"blocks.{i}.attn.qkv", 3 * width, width)
        linear(f"blocks.{i}.attn.proj", width, width)
        linear(f"blocks.{i}.mlp.linear_fc1", inner, width)
        linear(f"blocks.{i}.mlp.linear_fc2", width, inner)
    merger("merger", width)
    for i in range(len(vision.deepstack_layers)):
        merger(f"deepstack_merger_list.{i}", wide)
    return shapes


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: the file is absent or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file.parent}: not a checkpoint: it has no {file.name}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def check_tensors(
    tensors: Mapping[str, TensorRef],
    shapes: Mapping[str, tuple[int, ...]],
    directory: Path,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Refuse tensors that are missing, surplus (but for ``optional``), misshapen, or not of a float type."""
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise UserError(f"{directory}: {_some(missing)} missing; its config promises them. Use the whole checkpoint.")
    surplus = [name for name in tensors if name not in shapes and name not in optional]
    if surplus:
        raise UserError(
            f"{directory}: {_some(surplus)} surplus; its config has no place for them. Correct config.json."
        )
    for name, shape in shapes.items():
        ref = tensors[name]
        if ref.shape != shape:
            raise UserError(
                f"{directory}: {name}: expected shape {list(shape)} by config.json, "
                f"got {list(ref.shape)} in {ref.file.name}"
            )
        if ref.dtype not in _FLOATS:
            raise UserError(
                f"{directory}: {name}: expected float32, float16 or bfloat16, got {ref.dtype}. "
                "Use the unquantised checkpoint."
            )


def _some(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{rest}"


def _check_kind(config: Mapping[str, Any], directory: Path) -> None:
    found = config.get("model_type"), (config.get("architectures") or [None])[0]
    if found[0] != "qwen3_vl" or found[1] not in {None, _ARCHITECTURE}:
        what = f"model_type {found[0]!r}, architecture {found[1]!r}"
        hint = " Mixture-of-experts Qwen3-VL is not supported." if "moe" in str(found[0]) else ""
        raise UserError(f"{directory}: expected a dense Qwen3-VL ({_ARCHITECTURE}), got {what}.{hint}")
    quantised = config.get("quantization_config") or _section(config, "text_config").get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UserError(f"{directory}: quantised by {method}: not supported. Use the unquantised checkpoint.")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise UserError(f"config.json: {name}: expected an object, got {section!r}")
    return section


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"config.json: {key}: expected a whole number, got {value!r}")
    return value


def _text_spec(config: Mapping[str, Any]) -> TextSpec:
    text = _section(config, "text_config")
    if text.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: text_config.hidden_act: expected silu, got {text['hidden_act']!r}")
    head_dim = _int(text, "head_dim", 128)  # transformers' default for this model, not hidden_size / heads
    num_heads, num_kv_heads = _int(text, "num_attention_heads"), _int(text, "num_key_value_heads")
    if not num_kv_heads or num_heads % num_kv_heads or head_dim % 2:
        raise UserError(
            f"config.json: {num_heads} heads, {num_kv_heads} key-value heads of {head_dim}: "
            "expected whole groups of heads of an even size"
        )
    return TextSpec(
        hidden_size=_int(text, "hidden_size"),
        intermediate_size=_int(text, "intermediate_size"),
        num_layers=_int(text, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_int(text, "vocab_size"),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope=_rope(text, head_dim),
        max_position_embeddings=_int(text, "max_position_embeddings"),
        attention_bias=bool(text.get("attention_bias", False)),
    )


def _rope(text: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """transformers 5 has ``rope_parameters``; 4.57 has ``rope_scaling`` beside ``rope_theta``."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    base = scaling.get("rope_theta", text.get("rope_theta"))
    if not isinstance(base, int | float) or base <= 0:
        raise UserError(
            f"config.json: text_config.rope_theta: expected a positive number, got {base!r} (where it is absent, "
            "transformers 4.57 takes 5e6 and 5.x 5e5). Write the one it was trained with."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in {"default", "mrope"}:  # 4.57 writes "mrope" in some configs; both mean the unscaled schedule
        raise UserError(f"config.json: text_config rope_type: expected default, got {kind!r}: not supported")
    sections = tuple(scaling.get("mrope_section", (24, 20, 20)))
    return RopeSpec.plain(head_dim, float(base), "interleaved", sections)


def _vision_spec(vision: Mapping[str, Any], text: TextSpec) -> VisionSpec:
    spec = VisionSpec(
        depth=_int(vision, "depth"),
        hidden_size=_int(vision, "hidden_size"),
        intermediate_size=_int(vision, "intermediate_size"),
        num_heads=_int(vision, "num_heads"),
        in_channels=_int(vision, "in_channels", 3),
        patch_size=_int(vision, "patch_size", 16),
        temporal_patch_size=_int(vision, "temporal_patch_size", 2),
        spatial_merge_size=_int(vision, "spatial_merge_size", 2),
        out_hidden_size=_int(vision, "out_hidden_size"),
        num_position_embeddings=_int(vision, "num_position_embeddings", 2304),
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
        hidden_act=str(vision.get("hidden_act", "gelu_pytorch_tanh")),
    )
    problems = {
        f"out_hidden_size {spec.out_hidden_size} is not the decoder's hidden_size {text.hidden_size}": (
            spec.out_hidden_size != text.hidden_size
        ),
        f"hidden_size {spec.hidden_size} is not {spec.num_heads} heads of a multiple of 4 channels": (
            spec.num_heads == 0 or spec.hidden_size % (4 * spec.num_heads) != 0
        ),
        f"num_position_embeddings {spec.num_position_embeddings} is not a square": (
            round(spec.num_position_embeddings**0.5) ** 2 != spec.num_position_embeddings
        ),
        f"deepstack_visual_indexes {list(spec.deepstack_layers)} are not distinct blocks of {spec.depth}": (
            len(set(spec.deepstack_layers)) != len(spec.deepstack_layers)
            or not all(isinstance(i, int) and 0 <= i < spec.depth for i in spec.deepstack_layers)
        ),
        f"{len(spec.deepstack_layers)} deepstack levels for {text.num_layers} decoder layers": (
            len(spec.deepstack_layers) > text.num_layers
        ),
    }
    for problem, found in problems.items():
        if found:
            raise UserError(f"config.json: vision_config: {problem}")
    return spec


def _canonical(tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    named: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        old, new = next(((o, n) for o, n in _PREFIXES if name.startswith(o)), ("", ""))
        canonical = new + name.removeprefix(old)
        if canonical in named:
            raise UserError(f"{ref.file.name}: {name} and {named[canonical].name} are the same weight under two names")
        named[canonical] = ref
    return named


def _tied_head(config: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> bool:
    """The head is tied where the checkpoint has none of its own.

    The flag cannot be trusted: transformers 4.57 takes True where it is absent, 5.x False; it stands at the top or in
    text_config; and where flag and an own head disagree, 5.x uses the head. A flag that says untied, with no head, is
    an incomplete checkpoint.
    """
    if "lm_head.weight" in tensors:
        return False
    flags = [s["tie_word_embeddings"] for s in (config, _section(config, "text_config")) if "tie_word_embeddings" in s]
    return not flags or any(flags)


def _eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens that transformers' ``generate`` would use; none where no config names one."""
    file = directory / "generation_config.json"
    places = [read_json(file)] if file.is_file() else []
    for place in (*places, config, _section(config, "text_config")):
        ids = place.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (_int(place, "eos_token_id"),)
    return ()
