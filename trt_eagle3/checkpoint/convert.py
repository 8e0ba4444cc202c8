"""Write a draft in another producer's layout with the same meaning, or raise the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trt_eagle3.atomic_io import atomic_directory, create_file
from trt_eagle3.checkpoint.config_value import config_value
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.model_config import read_json
from trt_eagle3.checkpoint.resolved_fields import EXTENSION
from trt_eagle3.checkpoint.tensor_file import (
    Content,
    array_content,
    read_integers,
    ref_content,
    write_tensors,
)
from trt_eagle3.errors import UserError

__all__ = ["DESTINATIONS", "Layout", "convert_draft"]

Layout = Literal["specforge", "speculators", "modelopt", "tensorrt-llm"]
_PLACES = ("producer", "path", "tensors", "sources", "warnings")  # a copy differs in these
# The server that runs a draft decides these. No format has a key for them.
_SERVED = (
    "aux_layers",
    "aux_pre_deepstack",
    "image_rows",
    "image_rows_rotated",
    "positions",
    "position_shift",
)
_NO_VERIFIER = (
    "verifier: the draft's config names no target, so speculators_config.verifier.architectures is "
    "empty. Name it: --target"
)
_BASE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Destination:
    """The properties of a layout.

    Attributes:
        config: builds its config.json, without ``EXTENSION``.
        only: manifest field -> the only values that it supports.
        rope_layouts: the rope layouts that it supports.
        cannot: describes any other part of a manifest that it does not support; empty if none.
        layer_zero: its name of layer 0.
        full_vocab_map: whether to write d2t and t2d even for a full vocabulary in the target's
            order.
        t2d: whether to write t2d at all.
    """

    config: Callable[[Eagle3Manifest], dict[str, Any]]
    only: Mapping[str, tuple[Any, ...]]
    rope_layouts: tuple[str, ...] = ("1d",)
    layer_zero: str = "layers.0."
    cannot: Callable[[Eagle3Manifest], str] = lambda _: ""
    t2d: bool = False
    full_vocab_map: bool = False


def convert_draft(
    manifest: Eagle3Manifest, destination: Path, to: Layout, architecture: str | None = None
) -> tuple[str, ...]:
    """Write ``manifest``'s draft in the layout ``to`` into the folder ``destination``, atomically.

    The weights are copied bit for bit. Fields that no layout has (deepstack timing, image rows,
    positions) are stored under ``EXTENSION`` in the config, where ``read_draft`` reads them.

    Args:
        architecture: the target's, which the speculators layout names; None: as in the draft's own
            config.
    Returns:
        Fields that a server of that layout decides, perhaps differently from this draft; one line
            each.
    Raises:
        UserError: the layout cannot express a field, named in the message; or the folder is in use.
    """
    if to not in DESTINATIONS:
        raise UserError(f"layout {to!r}: expected one of {', '.join(DESTINATIONS)}")
    layout = DESTINATIONS[to]
    _refuse_inexpressible(manifest, layout, to)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: exists. Name a new folder.")
    config = layout.config(manifest) | {
        EXTENSION: {name: getattr(manifest, name) for name in _SERVED}
    }
    notes = _left_to_the_server(manifest, to)
    if to == "speculators":
        verifier = _verifier(manifest, architecture)
        config["speculators_config"]["verifier"] = verifier
        notes += () if verifier["architectures"] else (_NO_VERIFIER,)
    with atomic_directory(destination) as folder:
        write_tensors(folder / "model.safetensors", _contents(manifest, layout))
        create_file(folder / "config.json", f"{json.dumps(config, indent=2)}\n".encode())
        if to == "tensorrt-llm":
            _write_speculative_config(folder, manifest)
        _refuse_changed(manifest, read_draft(folder, None), to)
    return notes


def _refuse_inexpressible(manifest: Eagle3Manifest, layout: Destination, to: str) -> None:
    if manifest.parallel is not None:
        raise UserError(
            f"{manifest.path}: a P-EAGLE draft: no layout here holds its mask rows. Servers that "
            "run it read its own files."
        )
    for field, values in layout.only.items():
        value = getattr(manifest, field)
        if value not in values:
            raise _inexpressible(
                manifest, f"{field} {value!r}, only {' or '.join(map(repr, values))}", to
            )
    rope = manifest.rope.layout
    if rope not in layout.rope_layouts:
        raise _inexpressible(
            manifest,
            f"rope.layout {rope!r}, only {' or '.join(map(repr, layout.rope_layouts))}",
            to,
        )
    other = layout.cannot(manifest)
    if other:
        raise _inexpressible(manifest, other, to)


def _refuse_changed(manifest: Eagle3Manifest, copy: Eagle3Manifest, to: str) -> None:
    """Check that the copy, read back, has the same meaning."""
    for field in fields(Eagle3Manifest):
        before, after = getattr(manifest, field.name), getattr(copy, field.name)
        if field.name not in _PLACES and before != after:
            what = f"{field.name} {_short(before)} (it would be read back as {_short(after)})"
            raise _inexpressible(manifest, what, to)


def _inexpressible(manifest: Eagle3Manifest, what: str, to: str) -> UserError:
    others = ", ".join(name for name in DESTINATIONS if name != to)
    return UserError(
        f"{manifest.path}: the {to} layout cannot express {what}. Choose another of {others}."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _left_to_the_server(manifest: Eagle3Manifest, to: str) -> tuple[str, ...]:
    values = {
        field: getattr(manifest, field)
        for field in ("aux_pre_deepstack", "image_rows", "positions")
    }
    return tuple(
        f"{field}: {value!r} here; a server of the {to} layout decides it"
        for field, value in values.items()
    )


def _contents(manifest: Eagle3Manifest, layout: Destination) -> dict[str, Content]:
    contents = {
        layout.layer_zero + name.removeprefix("layers.0.")
        if name.startswith("layers.0.")
        else name: ref_content(ref)
        for name, ref in manifest.tensors.items()
        if name != "d2t"
    }
    vocab, drafted = manifest.vocab_size, manifest.draft_vocab_size
    stored = manifest.tensors.get("d2t")
    d2t = read_integers(stored) if stored else np.zeros(drafted, dtype=np.int64)
    if drafted == vocab and not d2t.any() and not layout.full_vocab_map:
        return contents
    contents["d2t"] = array_content(d2t)
    if layout.t2d:
        t2d = np.zeros(vocab, dtype=np.bool_)
        t2d[d2t + np.arange(drafted)] = True
        contents["t2d"] = array_content(t2d)
    return contents


def _geometry(m: Eagle3Manifest) -> dict[str, Any]:
    geometry = {
        "attention_bias": m.attention_bias,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "mlp_bias": m.mlp_bias,
        "num_attention_heads": m.num_heads,
        "num_hidden_layers": m.num_layers,
        "num_key_value_heads": m.num_kv_heads,
        "rms_norm_eps": m.rms_norm_eps,
        "vocab_size": m.vocab_size,
    }
    return geometry | (
        {"max_position_embeddings": m.max_position_embeddings} if m.max_position_embeddings else {}
    )


def _rope(m: Eagle3Manifest) -> dict[str, Any]:
    """Return both spellings: transformers 5 reads the first, older servers the other two."""
    kind = {
        "rope_type": "mrope" if m.rope.layout == "chunked" else m.rope.kind,
        **m.rope.parameters,
    }
    if m.rope.sections:
        kind["mrope_section"] = list(m.rope.sections)
    scaled = kind["rope_type"] != "default"
    return {
        "rope_parameters": {**kind, "rope_theta": m.rope.base},
        "rope_scaling": kind if scaled else None,
        "rope_theta": m.rope.base,
    }


def _draft_keys(m: Eagle3Manifest) -> dict[str, Any]:
    keys: dict[str, Any] = {"draft_vocab_size": m.draft_vocab_size}
    return keys | (
        {"target_hidden_size": m.target_hidden_size}
        if m.target_hidden_size != m.hidden_size
        else {}
    )


def _specforge(m: Eagle3Manifest) -> dict[str, Any]:
    eagle = {"eagle_aux_hidden_state_layer_ids": list(m.aux_layers), "use_aux_hidden_state": True}
    # norm_output is omitted: SpecForge then assumes a final norm, sglang features from before it
    norms = {"fc_norm": True} if m.fc_norm else {}
    return _BASE | _geometry(m) | _rope(m) | _draft_keys(m) | norms | {"eagle_config": eagle}


def _speculators(m: Eagle3Manifest) -> dict[str, Any]:
    layer = {
        "model_type": "qwen3" if m.qk_norm else "llama",
        **_geometry(m),
        **_rope(m),
        "tie_word_embeddings": False,
    }
    if m.qk_norm:
        del layer["mlp_bias"]
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": m.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in m.aux_layers],
        "fc_norm": m.fc_norm,
        "norm_before_fc": m.norm_before_fc,
        "norm_before_residual": m.residual == "normed",
        "norm_output": m.feedback == "post_norm",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
        },
        "target_hidden_size": None
        if m.target_hidden_size == m.hidden_size
        else m.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }


def _verifier(m: Eagle3Manifest, architecture: str | None) -> dict[str, Any]:
    """Return the target's entry in a speculators config."""
    if architecture is not None:
        return {"architectures": [architecture], "name_or_path": None}
    file = m.path / "config.json"
    key, own = "speculators_config.verifier", read_json(file)
    names = config_value(own, f"{key}.architectures", "texts", file) or []
    where = config_value(own, f"{key}.name_or_path", "text", file)
    return {"architectures": list(names), "name_or_path": where}


def _modelopt(m: Eagle3Manifest) -> dict[str, Any]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": list(m.aux_layers),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    rope = _rope(m)
    rope = {"rope_scaling": rope["rope_scaling"], "rope_theta": rope["rope_theta"]}
    return _BASE | _geometry(m) | rope | _draft_keys(m) | {"eagle_config": eagle}


def _tensorrt_llm(m: Eagle3Manifest) -> dict[str, Any]:
    config = _modelopt(m) | _rope(m) | {"bias": m.fc_bias}
    config["eagle_config"] |= {
        "norm_before_fc": m.norm_before_fc,
        "fc_norm": m.fc_norm,
        "return_hidden_post_norm": m.feedback == "post_norm",
    }
    return config


def _write_speculative_config(folder: Path, m: Eagle3Manifest) -> None:
    """Write the aux layers, which TensorRT-LLM reads from its speculative config."""
    text = f"decoding_type: Eagle\neagle3_layers_to_capture: {list(m.aux_layers)}\n"
    create_file(folder / "speculative_config.yaml", text.encode())


def _not_three(m: Eagle3Manifest) -> str:
    return "" if len(m.aux_layers) == 3 else f"{len(m.aux_layers)} aux layers, only 3"


def _other_width(m: Eagle3Manifest) -> str:
    same = m.target_hidden_size == m.hidden_size
    return (
        ""
        if same
        else f"target_hidden_size {m.target_hidden_size} beside hidden_size {m.hidden_size}"
    )


def _unspeculative(m: Eagle3Manifest) -> str:
    if m.norm_before_fc and m.fc_norm:
        return "norm_before_fc and fc_norm in one draft"
    return "mlp_bias beside qk_norm" if m.mlp_bias and m.qk_norm else ""


_PLAIN = {"residual": ("hidden",), "first_norm": ("single",), "qk_norm": (False,), "head": ("own",)}
_NO_NORMS = {"norm_before_fc": (False,), "feedback": ("pre_norm",), "fc_bias": (False,)}
DESTINATIONS: Mapping[str, Destination] = {
    "specforge": Destination(
        _specforge,
        _PLAIN | _NO_NORMS | {"num_layers": (1,), "attention_bias": (False,), "mlp_bias": (False,)},
        rope_layouts=("1d", "chunked"),
        layer_zero="midlayer.",
        cannot=_not_three,
        t2d=True,
        full_vocab_map=True,
    ),
    "speculators": Destination(
        _speculators,
        {"first_norm": ("single",), "head": ("own",), "fc_bias": (False,)},
        cannot=_unspeculative,
        t2d=True,
    ),
    "modelopt": Destination(
        _modelopt,
        _PLAIN | _NO_NORMS | {"fc_norm": (False,), "embedding": ("target",)},
        cannot=_other_width,
    ),
    "tensorrt-llm": Destination(_tensorrt_llm, _PLAIN),
}
"""Layouts that a draft can be written in, by name."""
