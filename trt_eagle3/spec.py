"""Specification of a model of any family, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trt_eagle3.errors import UserError
from trt_eagle3.rope_spec import RopeLayout, RopeSpec

__all__ = [
    "AttentionSpec",
    "DenseMlp",
    "GatedDeltaSpec",
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

StateKind = Literal["paged", "window", "delta"]


@dataclass(frozen=True)
class StateSpec:
    """A state that a layer keeps between forwards; a graph lists its states in its metadata.

    Attributes:
        name: of the graph's input. The output that updates it is called ``<name>_out``, before the
            layer's suffix (``k_cache.3`` -> ``k_cache_out.3``).
        kind: type of the state; it determines how accepted rows are committed. ``paged``: one row
            per token, in pages. The other kinds have an entry per sequence. ``window``: the last
            rows before a convolution. ``delta``: the matrices of a gated delta rule.
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
        return self._with("out")

    @property
    def rows_name(self) -> str:
        """Name of the graph's output with the contribution of each new row. Only for states with an
        entry per sequence.
        """
        return self._with("rows")

    def _with(self, suffix: str) -> str:
        stem, dot, layer = self.name.partition(".")
        return f"{stem}_{suffix}{dot}{layer}"


@dataclass(frozen=True)
class NormSpec:
    """An RMSNorm; ``eps`` is added to the mean square, ``weight_offset`` to the stored weight."""

    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of grouped heads over all previous tokens.

    Attributes:
        rope: rotates only a part of each head if it has fewer pairs than head_dim / 2.
        qk_norm: norm of each head of q and k, before their rotation; None: no norm.
        qkv_bias, out_bias: whether those projections have biases.
        output_gate: q_proj has as many gate channels after each head of q. Their sigmoid multiplies
            the head's output.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: NormSpec | None
    qkv_bias: bool
    out_bias: bool
    output_gate: bool = False

    @property
    def q_proj_width(self) -> int:
        """Rows of q_proj."""
        return self.q_width * (2 if self.output_gate else 1)

    @property
    def row_width(self) -> int:
        """Inner values of one row."""
        return self.q_width + self.q_proj_width + 4 * self.kv_width

    def num_values(self, hidden: int) -> int:
        """Return the numbers in its weights; ``hidden``: width of its rows."""
        return hidden * (self.q_width + self.q_proj_width + 2 * self.kv_width)

    @property
    def q_width(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads, equal to those of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule (``graph/ops/gated_delta.py``), after a causal
    convolution of q, k and v.

    Attributes:
        num_k_heads: heads of q and of k, of width ``key_dim``. num_v_heads: heads of v, of width
            ``value_dim``.
        conv_width: rows that the convolution reads.
        norm: norm of each head of the output.
        interleaved: whether q, k, v and z are rows of one projection, and b and a of another, each
            by key head: the rows of head 0, then those of head 1, ...
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: NormSpec
    interleaved: bool = False

    kv_width = 0  # width of keys in pages: it has none

    @property
    def k_width(self) -> int:
        """Channels of all key heads, equal to those of all query heads."""
        return self.num_k_heads * self.key_dim

    @property
    def v_width(self) -> int:
        """Channels of all value heads."""
        return self.num_v_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.k_width + self.v_width

    @property
    def row_width(self) -> int:
        """Inner values of one row."""
        return 3 * self.channels + 4 * self.v_width + 2 * self.num_v_heads

    @property
    def state_values(self) -> int:
        """Numbers in the matrices of one sequence, in float32."""
        return self.num_v_heads * self.key_dim * self.value_dim

    @property
    def window_values(self) -> int:
        """Numbers in the convolution's rows of one sequence, in the compute type."""
        return (self.conv_width - 1) * self.channels

    def num_values(self, hidden: int) -> int:
        """Return the numbers in its weights; ``hidden``: width of its rows."""
        rows = self.channels + 2 * self.v_width + 2 * self.num_v_heads
        return hidden * rows + self.channels * self.conv_width


@dataclass(frozen=True)
class DenseMlp:
    """``down(silu(gate(x)) * up(x))`` without biases."""

    intermediate_size: int

    @property
    def row_width(self) -> int:
        """Inner values of one row."""
        return self.intermediate_size

    def num_values(self, hidden: int) -> int:
        """Return the numbers in its weights; ``hidden``: width of its rows."""
        return 3 * hidden * self.intermediate_size


@dataclass(frozen=True)
class SparseMoe:
    """A mixture of ``num_experts`` MLPs; each row goes through ``top_k`` of them.

    A row's experts are those with the largest softmax probabilities. Their outputs are summed with
    these probabilities as weights.

    Attributes:
        expert_width: inner width of an expert.
        renormalise: divide the weights of a row's experts by their sum.
        shared_expert_width: inner width of an MLP that every row also goes through, times the
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
        """Return the numbers in its weights and the router's; ``hidden``: width of its rows."""
        inner = self.num_experts * self.expert_width + self.shared_expert_width
        gates = self.num_experts + (self.shared_expert_width > 0)
        return hidden * (3 * inner + gates)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        mixer: mixes the rows of a sequence. mlp: follows the mixer.
        norm: before the mixer and before the MLP.
        visual_level: index of the visual level that is added to the layer's output at the visual
            rows; None: no level.
    """

    mixer: AttentionSpec | GatedDeltaSpec
    mlp: DenseMlp | SparseMoe
    norm: NormSpec
    visual_level: int | None = None


@dataclass(frozen=True)
class VisionSpec:
    """A vision tower, and the placeholder tokens of its output in a prompt.

    Attributes:
        depth: blocks of ``num_heads`` heads, ``hidden_size`` and ``intermediate_size`` wide.
        patch_size: pixels along a side of a patch. temporal_patch_size: frames in a patch.
        spatial_merge_size: patches along a side of a visual token.
        out_hidden_size: width of a visual embedding, equal to the decoder's hidden size.
        num_position_embeddings: entries of the square table of positions; 0: there is none.
        level_blocks: blocks after which the visual levels are taken, in the order of the levels.
        image_token_id, video_token_id: the tokens that visual embeddings replace.
        vision_start_token_id, vision_end_token_id: the tokens around them; None: not in the config.
        own: further numbers of this tower, which only its family reads.
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
    """A target: its decoder, its vision tower, and its end tokens.

    Attributes:
        family: the checkpoint's ``model_type``; ``families.registry`` finds the family by it.
        norm: the last norm, before the head.
        tied_head: whether the head shares its weight with the token table.
        vision: None for a text-only target.
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
        """Number of visual levels; one decoder layer receives each."""
        return sum(layer.visual_level is not None for layer in self.layers)

    def require_vision(self) -> VisionSpec:
        """Return the vision tower.

        Raises:
            UserError: the target is text-only.
        """
        if self.vision is None:
            raise UserError(f"this target ({self.family}) reads text only: it has no vision tower")
        return self.vision

    @property
    def attention(self) -> AttentionSpec:
        """Attention of the first layer that has any; a draft's geometry is compared with it."""
        return next(spec for _, spec in self.attention_layers)

    @property
    def attention_layers(self) -> list[tuple[int, AttentionSpec]]:
        """The layers with attention, by index."""
        layers = enumerate(self.layers)
        return [(k, m) for k, layer in layers if isinstance(m := layer.mixer, AttentionSpec)]

    @property
    def recurrent_layers(self) -> list[tuple[int, GatedDeltaSpec]]:
        """The layers with a state per sequence, by index."""
        layers = enumerate(self.layers)
        return [(k, m) for k, layer in layers if isinstance(m := layer.mixer, GatedDeltaSpec)]
