"""TargetCheckpoint: a target and the places of its weights; conversion of targets to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trt_eagle3.checkpoint.kv_scales import KVScales
from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.quantised.read import StoredWeights
from trt_eagle3.checkpoint.quantised.weight import Quantisation
from trt_eagle3.checkpoint.spec_numbers import check_numbers
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, quote
from trt_eagle3.spec import LayerSpec, TargetSpec, VisionSpec

__all__ = ["MtpHead", "TargetCheckpoint", "target_from_dict", "target_to_dict"]


@dataclass(frozen=True)
class MtpHead:
    """An MTP head (multi-token prediction) in a target's checkpoint, unchecked.

    ``drafts/mtp`` checks it when a build uses it as the draft.

    Attributes:
        layer: its decoder layer, by the config; a mixture of experts if the target's are.
        stored: its tensors, by name in the checkpoint without ``mtp.``: ``fc.weight``,
            ``pre_fc_norm_embedding.weight``, ``pre_fc_norm_hidden.weight``, ``norm.weight``,
            ``layers.0.`` and a decoder layer's names.
        config: the checkpoint's config.
        section: dotted prefix of the head's keys in the config.
        fp8_block: rows and columns that share a scale of stacked FP8 experts.
    """

    layer: LayerSpec
    stored: StoredWeights
    config: ModelConfig
    section: str = ""
    fp8_block: tuple[int, int] | None = None


@dataclass(frozen=True)
class TargetCheckpoint(TargetSpec):
    """A target read from a checkpoint.

    Attributes:
        path: the checkpoint's folder.
        tensors: canonical name -> place on disk. Canonical names are the same in all families:
            ``layers.0.self_attn.q_proj.weight``, ``embed_tokens.weight``, ``norm.weight``,
            ``visual.`` before those of a vision tower, and ``lm_head.weight``, which is the token
            table's place if the head is tied.
        quantisation: its claims about quantised weights; None if it has none.
        kv_scales: layer -> scales of an FP8 KV cache; 1 for other layers. A checkpoint's scales are
            read and checked on first use.
        mtp: its own head for multi-token prediction; None if it has none.
    """

    path: Path
    tensors: Mapping[str, TensorRef]
    quantisation: Quantisation | None = None
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)
    mtp: MtpHead | None = None


_MAX_LAYERS = 1 << 14  # per run of equal layers; above any decoder's number
_SPEC_FIELDS = tuple(field.name for field in fields(TargetSpec))


def target_to_dict(spec: TargetSpec) -> dict[str, Any]:
    """Convert the target to JSON values, without its places on disk.

    ``layers`` lists runs of equal layers, each with its ``count``.
    """
    bare = TargetSpec(**{name: getattr(spec, name) for name in _SPEC_FIELDS})
    plain: dict[str, Any] = _adapter().dump_python(bare, mode="json")
    plain["layers"] = [
        {"count": len(list(run)), **layer} for layer, run in groupby(plain["layers"])
    ]
    return plain


def target_from_dict(plain: Mapping[str, Any]) -> TargetSpec:
    """Read the spec that ``target_to_dict`` wrote.

    Raises:
        UserError: a number is invalid for every target. The message names it.
    """
    layers = [layer for run in plain["layers"] for layer in _repeated(run)]
    spec = _adapter().validate_python({**plain, "layers": layers})
    check_numbers(spec, "target")
    if spec.vision is not None:
        _check_tower(spec.vision)
    return spec


def _check_tower(vision: VisionSpec) -> None:
    entries, blocks = vision.num_position_embeddings, vision.level_blocks
    if round(entries**0.5) ** 2 != entries:
        raise UserError(
            f"target.vision.num_position_embeddings: expected a square number, got {entries}"
        )
    if len(set(blocks)) != len(blocks) or any(block >= vision.depth for block in blocks):
        raise UserError(
            f"target.vision.level_blocks: expected distinct blocks below {vision.depth}, got "
            f"{quote(list(blocks))}"
        )


def _repeated(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    layer = dict(run)
    count = layer.pop("count")
    if not 0 < count <= _MAX_LAYERS:
        raise ValueError(f"layers: count: expected 1 to {_MAX_LAYERS}, got {count}")
    return [layer] * count


@cache
def _adapter() -> TypeAdapter[TargetSpec]:
    return TypeAdapter(TargetSpec)
