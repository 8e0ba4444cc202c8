"""What a model is, of any family, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.errors import UserError, quote

__all__ = [
    "AttentionSpec",
    "DenseMlp",
    "LayerSpec",
    "NormSpec",
    "RopeLayout",
    "RopeSpec",
    "SparseMoe",
    "StateKind",
    "StateSpec",
    "TargetSpec",
    "VisionSpec",
]

RopeLayout = Literal["1d", "chunked", "interleaved"]
StateKind = Literal["paged", "per_sequence"]


@dataclass(frozen=True)
class StateSpec:
    """A state that a layer keeps between forwards; a graph lists its states in its metadata.

    Attributes:
        name: of the graph's input; the output that updates it is called ``<name>_out`` with the
            layer's suffix kept last (``k_cache.3`` -> ``k_cache_out.3``).
        kind: ``paged``: one row per token, in pages; ``per_sequence``: one entry per sequence.
        shape: of one row or one entry, without the leading dimension.
        dtype: name of the element type (``float32``, ``float16``, ``bfloat16``).
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    dtype: str

    @property
    def output_name(self) -> str:
        """Name of the graph's output that updates the state."""
        stem, dot, layer = self.name.partition(".")
        return f"{stem}_out{dot}{layer}"


@dataclass(frozen=True)
class RopeSpec:
    """Which angle each pair of a head's channels turns by.

    Attributes:
        layout: how the pairs are dealt to the temporal, height and width axes. ``chunked`` is
            Qwen2-VL's (first the temporal pairs, then height, then width); ``interleaved`` is
            Qwen3-VL's (T H W T H W ..., the rest T).
        sections: pairs per axis (T, H, W); sums to head_dim / 2. Empty for ``1d``.
        inv_freq: float32 radians per position, one per pair (head_dim / 2 of them).
        attention_scaling: factor on cos and sin (1 except for yarn).
        kind: the name of the frequency schedule it was made from (``default``, ``linear``,
            ``dynamic``, ``llama3``, ``yarn``).
        base: the schedule's theta.
        parameters: the schedule's other numbers, as a config spells them (``factor``,
            ``beta_fast``, ...).
    """

    layout: RopeLayout
    sections: tuple[int, ...]
    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    kind: str = "default"
    base: float = 10000.0
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.layout == "1d":
            if self.sections:
                raise UserError(
                    f"rope: a 1d layout has no sections, got {quote(list(self.sections))}"
                )
        elif len(self.sections) != 3 or sum(self.sections) != len(self.inv_freq):
            raise UserError(
                f"rope: mrope_section {quote(list(self.sections))}: expected 3 counts that sum to "
                f"head_dim / 2 = {len(self.inv_freq)}"
            )

    @classmethod
    def plain(
        cls, head_dim: int, base: float, layout: RopeLayout = "1d", sections: tuple[int, ...] = ()
    ) -> RopeSpec:
        """The unscaled schedule ``base ** (-2 i / head_dim)``."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inv_freq = np.float32(1.0) / np.float32(base) ** exponents
        return cls(layout, sections, tuple(float(f) for f in inv_freq), base=base)

    @property
    def axis_of_pair(self) -> NDArray[np.int64]:
        """int64 [head_dim / 2]: 0, 1, 2 = the temporal, height or width position that turns the
        pair.

        Interleaved: pair i takes H if ``i % 3 == 1 and i < 3 * sections[1]``, W if ``i % 3 == 2 and
        i < 3 * sections[2]``, else T (transformers,
        ``Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope``).
        """
        pairs = len(self.inv_freq)
        axis = np.zeros(pairs, dtype=np.int64)
        if self.layout == "chunked":
            axis = np.repeat(np.arange(3), self.sections)
        elif self.layout == "interleaved":
            for a in (1, 2):
                axis[a : 3 * self.sections[a] : 3] = a
        return axis


@dataclass(frozen=True)
class NormSpec:
    """An RMSNorm; ``eps`` is added to the mean square."""

    eps: float


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of grouped heads over everything before.

    Attributes:
        qk_norm: of each head of q and k, before they are rotated; None: there is none.
        qkv_bias, out_bias: whether those projections have biases.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: NormSpec | None
    qkv_bias: bool
    out_bias: bool

    @property
    def q_width(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, which are as many as those of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DenseMlp:
    """``down(silu(gate(x)) * up(x))`` without biases."""

    intermediate_size: int

    @property
    def row_width(self) -> int:
        """Inner values of one row."""
        return self.intermediate_size

    def num_values(self, hidden: int) -> int:
        """Numbers in its weights; ``hidden``: width of its rows."""
        return 3 * hidden * self.intermediate_size


@dataclass(frozen=True)
class SparseMoe:
    """A mixture of ``num_experts`` MLPs, of which each row goes through ``top_k``.

    A row's experts are those of the largest softmax probabilities, and what they give is summed
    with these as weights.

    Attributes:
        expert_width: inner width of an expert.
        renormalise: the weights of a row's experts are divided by their sum.
        shared_expert_width: inner width of an MLP that every row goes through too, times the
            sigmoid of a gate; 0: there is none.
    """

    num_experts: int
    top_k: int
    expert_width: int
    renormalise: bool
    shared_expert_width: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise UserError(
                f"mixture of experts: expected 1 to {self.num_experts} experts for each token, got "
                f"{self.top_k}"
            )

    @property
    def row_width(self) -> int:
        """Inner values of one row."""
        return self.top_k * self.expert_width + self.shared_expert_width

    def num_values(self, hidden: int) -> int:
        """Numbers in its weights, the router's too; ``hidden``: width of its rows."""
        inner = self.num_experts * self.expert_width + self.shared_expert_width
        gates = self.num_experts + (self.shared_expert_width > 0)
        return hidden * (3 * inner + gates)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        mixer: what mixes the rows of a sequence. mlp: what follows it.
        norm: before the mixer and before the MLP.
        visual_level: index of the visual level that is added to the layer's output at the visual
            rows; None: none is.
    """

    mixer: AttentionSpec
    mlp: DenseMlp | SparseMoe
    norm: NormSpec
    visual_level: int | None = None


@dataclass(frozen=True)
class VisionSpec:
    """A vision tower, and the tokens that stand for its output in a prompt.

    Attributes:
        depth: blocks of ``num_heads`` heads, ``hidden_size`` and ``intermediate_size`` wide.
        patch_size: pixels along a side of a patch. temporal_patch_size: frames in a patch.
        spatial_merge_size: patches along a side of a visual token.
        out_hidden_size: width of a visual embedding, the decoder's hidden size.
        num_position_embeddings: entries of the square table of positions; 0: there is none.
        level_blocks: after which blocks the visual levels are taken, in the order of the levels.
        image_token_id, video_token_id: the tokens that visual embeddings replace.
        vision_start_token_id, vision_end_token_id: the tokens around them; None: the config
            names none.
        own: further numbers of this tower, which its family alone reads.
    """

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
    level_blocks: tuple[int, ...]
    hidden_act: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    own: Mapping[str, bool | int | float | str | tuple[int, ...]] = field(default_factory=dict)

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch: channels * frames * height * width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class TargetSpec:
    """A target: its decoder, its vision tower, and the tokens it ends with.

    Attributes:
        family: the checkpoint's ``model_type``, by which ``families.registry`` finds the rest.
        norm: the last one, before the head.
        tied_head: whether the head is the token table.
        vision: None for a target that reads text only.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    vision: VisionSpec | None

    def __post_init__(self) -> None:
        if not self.layers:
            raise UserError("target: expected at least one decoder layer, got none")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def num_visual_levels(self) -> int:
        """Visual levels, each of which one decoder layer receives."""
        return sum(layer.visual_level is not None for layer in self.layers)

    def require_vision(self) -> VisionSpec:
        """The vision tower of a target that has one.

        Raises:
            UserError: it reads text only.
        """
        if self.vision is None:
            raise UserError(f"this target ({self.family}) reads text only: it has no vision tower")
        return self.vision

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer that has any: what a draft's geometry is held against."""
        return next(m for layer in self.layers if isinstance(m := layer.mixer, AttentionSpec))
