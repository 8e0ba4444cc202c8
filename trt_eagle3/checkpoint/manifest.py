"""DraftManifest: a draft's properties, with every ambiguity resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from trt_eagle3.checkpoint.spec_numbers import check_numbers
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.spec import RopeSpec

__all__ = [
    "AutoregressiveManifest",
    "DraftManifest",
    "Eagle3Manifest",
    "ParallelRows",
    "Source",
    "SourceKind",
    "autoregressive",
    "manifest_from_dict",
    "manifest_to_dict",
]

SourceKind = Literal["tensor", "config", "convention", "default", "override"]


@dataclass(frozen=True)
class Source:
    """The origin of a manifest field.

    Attributes:
        kind: ``tensor``: a tensor of the file. ``config``: a key of its config. ``convention``: the
            behaviour of the producer's code. ``default``: a fallback of this project. ``override``:
            the user.
        detail: the tensor, key or rule.
    """

    kind: SourceKind
    detail: str


@dataclass(frozen=True, kw_only=True)
class DraftManifest:
    """One draft of any kind (``drafts/kind.py``), fully resolved.

    It holds the fields that the target graph, decoding and parity need. Each kind has its own
    manifest, with the fields that only its graphs need.

    Attributes:
        producer: name of the reader that resolved it.
        num_layers: decoder layers, counted from the tensors.
        aux_layers: out(k) ids, ascending: output of target decoder layer k with its residual.
        aux_pre_deepstack: whether out(k) is taken before the deepstack level of layer k is added.
        embedding, head: the draft's own tensor or the target's.
        tensors: canonical name -> place on disk; the kind's manifest lists the names. With
            ``head: target``, it includes the target's ``lm_head.weight`` once a pair is read.
        max_position_embeddings: the longest context in its config; 0 if the config has none.
        sources: field -> its origin.
        warnings: warnings for the user, one line each.
    """

    kind: ClassVar[str]
    decided: ClassVar[frozenset[str]]
    """Fields that tensors determine. An override could only contradict them."""

    producer: str
    path: Path
    num_layers: int
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope: RopeSpec
    aux_layers: tuple[int, ...]
    aux_pre_deepstack: bool
    embedding: Literal["own", "target"]
    head: Literal["own", "target"]
    tensors: Mapping[str, TensorRef]
    max_position_embeddings: int = 0
    sources: Mapping[str, Source] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def takes_normed(self) -> bool:
        """Whether the draft reads the target's last hidden state after the final norm.

        It replaces the state that ``aux_layers`` names.
        """
        return False

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the aux hidden states: ``out(k)``, or ``norm``."""
        return ("norm",) if self.takes_normed else tuple(f"out({k})" for k in self.aux_layers)


@dataclass(frozen=True, kw_only=True)
class ParallelRows:
    """The mask rows of a draft that drafts its whole chain in one forward (P-EAGLE).

    Attributes:
        mask_token_id: the token whose embedding mask rows have.
        num_drafts: tokens per forward: one of the last committed row, the others of mask rows.
    """

    mask_token_id: int
    num_drafts: int

    def __str__(self) -> str:
        """Describe it in a table."""
        return f"{self.num_drafts} drafts per forward, mask token {self.mask_token_id}"


@dataclass(frozen=True, kw_only=True)
class AutoregressiveManifest(DraftManifest):
    """A draft that predicts one token per step: each step reads the features of the step before.

    Attributes:
        feedback: the features fed to the next draft step: before or after the final norm.
        image_rows: the embedding at image positions: the pad token's text embedding, or the vision
            rows.
        image_rows_rotated: whether vision rows are shifted left by one, like the token ids.
        positions: the rope positions of draft rows: the target's three axes, its temporal axis, or
            a linear count.
        position_shift: added to every draft position.
    """

    feedback: Literal["pre_norm", "post_norm"]
    image_rows: Literal["pad", "vision"]
    image_rows_rotated: bool
    positions: Literal["3d", "temporal", "linear"]
    position_shift: int

    @property
    def mask_rows(self) -> ParallelRows | None:
        """The rows that replace the later steps (P-EAGLE); None if it drafts step by step."""
        return None


@dataclass(frozen=True, kw_only=True)
class Eagle3Manifest(AutoregressiveManifest):
    """An EAGLE-3 draft. The input of layer 0 is concat[embedding, hidden].

    Attributes:
        residual: the operand that layer 0 adds its attention to: raw hidden or its hidden_norm.
        first_norm: ``single`` = hidden_norm(h); ``double`` = hidden_norm(input_layernorm(h))
            (ModelOpt 0.47).
        norm_before_fc: one RMSNorm (``input_norm``) over the concatenated aux states.
        fc_norm: one RMSNorm per aux state before fc (EAGLE-3.1).
        qk_norm: per-head RMSNorm of q and k (qwen3-style drafts).
        parallel: the rows that replace the later steps (P-EAGLE); None if it drafts step by step.
        tensors: ``fc.weight``, ``fc.bias``, ``fc_norm.{i}.weight``, ``input_norm.weight``,
            ``layers.{n}.{self_attn,mlp}...``, ``layers.{n}.hidden_norm.weight``,
            ``layers.{n}.input_layernorm.weight``, ``layers.{n}.post_attention_layernorm.weight``,
            ``norm.weight``, ``lm_head.weight``, ``embed_tokens.weight``, ``d2t``, and
            ``mask_hidden`` [1, 1, k * Ht], the aux states of mask rows.
    """

    kind: ClassVar[str] = "eagle3"
    decided: ClassVar[frozenset[str]] = frozenset(
        {
            *("path", "tensors", "sources", "warnings", "num_layers", "hidden_size"),
            *("target_hidden_size", "intermediate_size", "draft_vocab_size", "norm_before_fc"),
            *("fc_norm", "qk_norm", "attention_bias", "mlp_bias", "fc_bias"),
        }
    )

    intermediate_size: int
    rms_norm_eps: float
    residual: Literal["hidden", "normed"]
    first_norm: Literal["single", "double"]
    norm_before_fc: bool
    fc_norm: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    fc_bias: bool
    parallel: ParallelRows | None = None

    @property
    def mask_rows(self) -> ParallelRows | None:
        """``parallel``."""
        return self.parallel


def autoregressive(manifest: DraftManifest) -> AutoregressiveManifest:
    """Cast ``manifest`` to its class."""
    assert isinstance(manifest, AutoregressiveManifest), type(manifest)
    return manifest


_PLACES = ("path", "tensors")  # where a draft was read from, which is not one of its properties


def manifest_to_dict(manifest: DraftManifest) -> dict[str, Any]:
    """Convert the draft to JSON values, its kind first, without its places on disk."""
    kind: Any = type(manifest)  # hashable, which type checkers deny
    plain: dict[str, Any] = _adapter(kind).dump_python(manifest, mode="json", exclude=set(_PLACES))
    return {"kind": manifest.kind, **plain}


def manifest_from_dict(kind: type[DraftManifest], plain: Mapping[str, Any]) -> DraftManifest:
    """Read the manifest of class ``kind`` that ``manifest_to_dict`` wrote; it has no tensors.

    Raises:
        UserError: a number is invalid for every draft. The message names it.
    """
    own: Any = kind
    fields = {name: value for name, value in plain.items() if name != "kind"}
    found: DraftManifest = _adapter(own).validate_python({**fields, "path": ".", "tensors": {}})
    check_numbers(found, "draft")
    return found


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
