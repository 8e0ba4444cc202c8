"""MtpManifest: the properties of an MTP head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from trt_eagle3.checkpoint.manifest import AutoregressiveManifest
from trt_eagle3.spec import AttentionSpec, LayerSpec, NormSpec, TargetSpec

__all__ = ["MtpManifest", "as_served"]


@dataclass(frozen=True, kw_only=True)
class MtpManifest(AutoregressiveManifest):
    """An MTP head.

    Attributes:
        hidden: the target's hidden state that it reads: after its final norm, or before it.
            ``aux_layers`` is the last layer either way.
        concat: which half of the input of ``fc`` is the embedding.
        feedback: whether the next step's hidden state is taken after the head's own norm.
        norm_offset: added to the stored weights of all its norms.
        layer: its decoder layer; its norms use ``norm_offset``.
        tensors: ``fc.weight``, ``pre_fc_norm_embedding.weight``, ``pre_fc_norm_hidden.weight``,
            ``layers.0.{self_attn,mlp}...``, ``layers.0.input_layernorm.weight``,
            ``layers.0.post_attention_layernorm.weight``, ``norm.weight``, and the target's
            ``lm_head.weight``. A mixture's experts are two weights (``checkpoint/experts.py``).
    """

    kind: ClassVar[str] = "mtp"

    hidden: Literal["normed", "raw"]
    concat: Literal["embedding_first", "hidden_first"]
    norm_offset: float
    rms_norm_eps: float
    layer: LayerSpec

    @property
    def takes_normed(self) -> bool:
        return self.hidden == "normed"

    @property
    def norm(self) -> NormSpec:
        """Epsilon and weight offset of all its norms."""
        return NormSpec(self.rms_norm_eps, self.norm_offset)

    @property
    def attention(self) -> AttentionSpec:
        """The layer's attention."""
        mixer = self.layer.mixer
        assert isinstance(mixer, AttentionSpec), "read from a layer that attends"
        return replace(mixer, qk_norm=self.norm if mixer.qk_norm else None)


_SERVED: Mapping[str, Any] = {
    "hidden": "normed",
    "concat": "embedding_first",
    "feedback": "post_norm",
    "norm_offset": 1.0,
    "image_rows": "vision",
    "image_rows_rotated": True,
    "positions": "3d",
    "position_shift": 0,
}
"""Fields that no tensor determines -> their values in vLLM for Qwen3.5's heads."""


def as_served(target: TargetSpec) -> dict[str, Any]:
    """Return the fields that no tensor determines, as servers read a head of ``target``."""
    own = {} if target.vision is not None else {"image_rows": "pad"}
    return {**_SERVED, "norm_offset": target.norm.weight_offset, **own}


MtpManifest.decided = frozenset(f.name for f in fields(MtpManifest)).difference(_SERVED) | {"d2t"}
