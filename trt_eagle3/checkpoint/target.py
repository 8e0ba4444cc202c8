"""TargetSpec: what a Qwen3-VL checkpoint is, read from its config and checked against its
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trt_eagle3.checkpoint.rope import RopeSpec
from trt_eagle3.checkpoint.tensor_index import TensorRef

__all__ = ["TargetSpec", "TextSpec", "VisionSpec", "target_from_dict", "target_to_dict"]


@dataclass(frozen=True)
class TextSpec:
    """Geometry of the decoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    attention_bias: bool


@dataclass(frozen=True)
class VisionSpec:
    """Geometry of the vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_layers: tuple[int, ...]
    hidden_act: str

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channels * frames * height * width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class TargetSpec:
    """A target checkpoint: geometry, token ids, and where each weight lies.

    Attributes:
        tensors: canonical name -> place on disk. Canonical names are the checkpoint's without the
            ``model.language_model.`` prefix (``layers.0.self_attn.q_proj.weight``,
            ``embed_tokens.weight``, ``norm.weight``), ``visual.`` for the tower
            (``visual.blocks.0.attn.qkv.weight``), and ``lm_head.weight``, which is the embedding
            table's place when the head is tied.
    """

    path: Path
    text: TextSpec
    vision: VisionSpec
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    tied_head: bool
    tensors: Mapping[str, TensorRef]

    @property
    def vocab_size(self) -> int:
        """Rows of the token table."""
        return self.text.vocab_size

    @property
    def num_deepstack(self) -> int:
        """Decoder layers that receive a deepstack level (the first ones)."""
        return len(self.vision.deepstack_layers)


_PLACES = ("path", "tensors")  # where a spec was read from; not part of what it is


def target_to_dict(spec: TargetSpec) -> dict[str, Any]:
    """What the target is, as plain JSON values, without where it lies."""
    plain: dict[str, Any] = _adapter().dump_python(spec, mode="json", exclude=set(_PLACES))
    return plain


def target_from_dict(plain: Mapping[str, Any]) -> TargetSpec:
    """The spec that ``target_to_dict`` wrote; it has no tensors."""
    return _adapter().validate_python({**plain, "path": ".", "tensors": {}})


@cache
def _adapter() -> TypeAdapter[TargetSpec]:
    return TypeAdapter(TargetSpec)
