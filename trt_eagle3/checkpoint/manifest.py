"""DraftManifest: what an EAGLE-3 draft is, with every ambiguity resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.spec import RopeSpec

__all__ = ["DraftManifest", "Source", "SourceKind", "manifest_from_dict", "manifest_to_dict"]

SourceKind = Literal["tensor", "config", "convention", "default", "override"]


@dataclass(frozen=True)
class Source:
    """Where a field of a manifest came from.

    Attributes:
        kind: a tensor of the file, a key of its config, what the producer's code does, a fallback
            of ours, or the user.
        detail: which tensor, key or rule.
    """

    kind: SourceKind
    detail: str


@dataclass(frozen=True)
class DraftManifest:
    """One draft, fully resolved.

    Attributes:
        producer: the reader that resolved it.
        num_layers: decoder layers, counted from the tensors. Layer 0 takes concat[embedding,
            hidden].
        aux_layers: out(k) ids, ascending: output of target decoder layer k with its residual.
        aux_pre_deepstack: whether out(k) is taken before the deepstack level of layer k is added.
        residual: what layer 0 adds its attention to: the raw hidden or its hidden_norm.
        first_norm: ``single`` = hidden_norm(h); ``double`` = hidden_norm(input_layernorm(h))
            (ModelOpt 0.47).
        norm_before_fc: one RMSNorm (``input_norm``) over the concatenated aux states.
        fc_norm: one RMSNorm per aux state before fc (EAGLE-3.1).
        feedback: the features fed to the next draft step: before or after the final norm.
        qk_norm: per-head RMSNorm of q and k (qwen3-style drafts).
        embedding, head: the draft's own tensor or the target's.
        image_rows: the embedding at image positions: the pad token's text embedding, or the vision
            rows.
        image_rows_rotated: whether vision rows are shifted left by one like the token ids are.
        positions: the rope positions of draft rows: the target's three axes, its temporal axis, or
            a linear count.
        position_shift: added to every draft position.
        tensors: canonical name -> place on disk: ``fc.weight``, ``fc.bias``,
            ``fc_norm.{i}.weight``, ``input_norm.weight``, ``layers.{n}.{self_attn,mlp}...``,
            ``layers.{n}.hidden_norm.weight``, ``layers.{n}.input_layernorm.weight``,
            ``layers.{n}.post_attention_layernorm.weight``, ``norm.weight``, ``lm_head.weight``,
            ``embed_tokens.weight``, ``d2t``.
        max_position_embeddings: the longest context its config names, 0 where it names none.
        sources: field -> where it came from. warnings: what a user should know, one line each.
    """

    producer: str
    path: Path
    num_layers: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    rope: RopeSpec
    aux_layers: tuple[int, ...]
    aux_pre_deepstack: bool
    residual: Literal["hidden", "normed"]
    first_norm: Literal["single", "double"]
    norm_before_fc: bool
    fc_norm: bool
    feedback: Literal["pre_norm", "post_norm"]
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    fc_bias: bool
    embedding: Literal["own", "target"]
    head: Literal["own", "target"]
    image_rows: Literal["pad", "vision"]
    image_rows_rotated: bool
    positions: Literal["3d", "temporal", "linear"]
    position_shift: int
    tensors: Mapping[str, TensorRef]
    max_position_embeddings: int = 0
    sources: Mapping[str, Source] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_PLACES = ("path", "tensors")  # where a draft was read from; not part of what it is


def manifest_to_dict(manifest: DraftManifest) -> dict[str, Any]:
    """What the draft is, as plain JSON values, without where it lies."""
    plain: dict[str, Any] = _adapter().dump_python(manifest, mode="json", exclude=set(_PLACES))
    return plain


def manifest_from_dict(plain: Mapping[str, Any]) -> DraftManifest:
    """The manifest that ``manifest_to_dict`` wrote; it has no tensors."""
    return _adapter().validate_python({**plain, "path": ".", "tensors": {}})


@cache
def _adapter() -> TypeAdapter[DraftManifest]:
    return TypeAdapter(DraftManifest)
