"""SpecForge's draft layout (facts: sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.checkpoint.target_reader import check_tensors, read_json
from trt_eagle3.checkpoint.tensor_index import open_index
from trt_eagle3.errors import UserError

__all__ = ["read"]

_ARCHITECTURE = "LlamaForCausalLMEagle3"
_DEFAULT_BASE = 10000.0


def read(directory: Path, target: TargetSpec, overrides: Mapping[str, Any]) -> DraftManifest:
    """Resolve a SpecForge draft; what its files leave open follows SpecForge's training code."""
    config = read_json(directory / "config.json")
    architecture = (config.get("architectures") or [None])[0]
    if architecture != _ARCHITECTURE:
        raise UserError(f"{directory}: expected an EAGLE-3 draft ({_ARCHITECTURE}), got {architecture!r}")
    tensors = {_canonical(name): ref for name, ref in open_index(directory).items()}
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"):
        if name not in tensors:
            raise UserError(f"{directory}: {name.replace('layers.0', 'midlayer')} is missing: not an EAGLE-3 draft")
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    hidden, aux_width = tensors["fc.weight"].shape
    head_dim = int(config.get("head_dim") or hidden // heads)
    own_head = "lm_head.weight" in tensors
    aux_layers = _aux_layers(config, target)
    manifest = DraftManifest(
        producer="specforge",
        path=directory,
        num_layers=1,
        hidden_size=hidden,
        target_hidden_size=aux_width // 3,
        intermediate_size=tensors["layers.0.mlp.gate_proj.weight"].shape[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        vocab_size=int(config["vocab_size"]),
        draft_vocab_size=tensors["lm_head.weight"].shape[0] if own_head else target.text.vocab_size,
        rope=_rope(config, head_dim),
        aux_layers=aux_layers,
        aux_pre_deepstack=True,
        residual="hidden",
        first_norm="single",
        norm_before_fc="input_norm.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        feedback="pre_norm",
        qk_norm=False,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.gate_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        embedding="own" if "embed_tokens.weight" in tensors else "target",
        head="own" if own_head else "target",
        image_rows="pad",
        image_rows_rotated=True,
        positions="3d",
        position_shift=0,
        tensors=tensors,
    )
    check_tensors(tensors, draft_shapes(manifest), directory, frozenset({"d2t", "t2d"}))
    return manifest


def draft_shapes(manifest: DraftManifest) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every weight of a draft of this geometry."""
    m, hidden = manifest, manifest.hidden_size
    q, kv, wide = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim, 3 * m.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, wide), "norm.weight": (hidden,)}
    if m.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if m.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if m.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (m.target_hidden_size,) for i in range(3)}
    if m.embedding == "own":
        shapes["embed_tokens.weight"] = (m.vocab_size, hidden)
    if m.head == "own":
        shapes["lm_head.weight"] = (m.draft_vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, 2 * hidden),
        "self_attn.k_proj.weight": (kv, 2 * hidden),
        "self_attn.v_proj.weight": (kv, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (m.intermediate_size, hidden),
        "mlp.up_proj.weight": (m.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, m.intermediate_size),
        "hidden_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return shapes | {f"layers.0.{name}": shape for name, shape in layer.items()}


def _canonical(name: str) -> str:
    aliases = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
    for old, new in {"midlayer.": "layers.0.", **aliases}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _aux_layers(config: Mapping[str, Any], target: TargetSpec) -> tuple[int, ...]:
    """SpecForge writes out(k) ids; left out, [1, n // 2 - 1, n - 4]."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    n = target.text.num_layers
    return (1, n // 2 - 1, n - 4) if ids is None else tuple(int(k) for k in ids)


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """rope_parameters, else rope_scaling with rope_theta; ``default`` with sections is plain 1-D in training."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(rope.get("rope_theta", config.get("rope_theta", _DEFAULT_BASE)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":
        return RopeSpec.plain(head_dim, base, "chunked", tuple(rope["mrope_section"]))
    if kind != "default":
        raise UserError(f"config.json: rope_type: expected default or mrope, got {kind!r}: not supported")
    return RopeSpec.plain(head_dim, base)
