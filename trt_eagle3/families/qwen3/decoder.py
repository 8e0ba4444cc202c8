"""Qwen3's decoder, which is Qwen3-VL's too: its config as ``LayerSpec``s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trt_eagle3.checkpoint.kv_scales import read_kv_scales
from trt_eagle3.checkpoint.model_config import ModelConfig, eos_token_ids, tied_head
from trt_eagle3.checkpoint.quantised.weight import Quantisation
from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import check_tensors, decoder_shapes
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import UserError, quote
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, NormSpec, RopeSpec, VisionSpec

__all__ = ["DecoderConfig"]


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder in a section of a config; ``section`` is its dotted prefix (``text_config.``)."""

    config: ModelConfig
    section: str = ""
    default_eps: ClassVar[float] = 1e-6
    default_max_window_layers: ClassVar[int] = 28

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._whole("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Rows of the token table."""
        return self._whole("vocab_size")

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the decoder was made for."""
        return self._whole("max_position_embeddings")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self._whole("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        """Channels of a head; transformers' default is 128, not hidden_size / heads."""
        return self._whole("head_dim", 128)

    @property
    def norm(self) -> NormSpec:
        """The norm of every place."""
        eps = self.config.get(f"{self.section}rms_norm_eps", "number", self.default_eps)
        if not 0 <= eps < 1:
            raise self.config.error(
                f"{self.section}rms_norm_eps: expected a small number, got {eps}"
            )
        return NormSpec(float(eps))

    def check(self) -> None:
        """Refuse what Qwen3's decoder can be and this program cannot compute."""
        act = self.config.get(f"{self.section}hidden_act", "text", "silu")
        if act != "silu":
            raise self.config.error(
                f"{self.section}hidden_act: expected silu, got {quote(act)}: not supported"
            )
        heads, kv_heads = self._heads()
        if heads % kv_heads or self.head_dim % 2 or self.head_dim > 1 << 16:
            raise self.config.error(
                f"{self.section or 'config'}: {heads} heads, {kv_heads} key-value heads of "
                f"{self.head_dim}: expected whole groups of heads of an even size"
            )

    def check_full_attention(self) -> None:
        """Refuse layers that see a window only; without ``layer_types``, transformers lets those
        from ``max_window_layers`` on slide.
        """
        config, section, num_layers = self.config, self.section, self.num_layers
        slides = config.get(f"{section}use_sliding_window", "flag", False)
        kinds = config.get(f"{section}layer_types", "texts", [])
        if kinds and len(kinds) != num_layers:
            raise config.error(
                f"{section}layer_types: expected {num_layers} of them, got {len(kinds)}"
            )
        windowed = any(kind != "full_attention" for kind in kinds)
        if not kinds and slides:
            default = self.default_max_window_layers
            windowed = config.whole(f"{section}max_window_layers", default, least=0) < num_layers
        if windowed:
            raise config.error(
                f"{section}sliding window attention (use_sliding_window, layer_types): not "
                "supported. Set use_sliding_window to false only if the checkpoint was trained "
                "without it."
            )

    def rope(self) -> RopeSpec:
        """One axis of positions, by the schedule that the config names."""
        config, section = self.config, self.section
        values = config.get(section[:-1], "object") if section else config.values
        rope = read_rope_config(values, config.file)
        if rope.base is None or rope.base <= 1:
            raise config.error(
                f"{section}rope_theta: expected a number above 1, got {rope.base}. Write the one "
                "it was trained with."
            )
        if rope.kind() == "dynamic":
            raise config.error(
                f"{section}rope_type dynamic: not supported. Use yarn, or no rope_scaling."
            )
        try:
            return make_rope(
                rope.kind(),
                rope.base,
                self.head_dim,
                parameters=rope.values,
                max_positions=self.max_position_embeddings,
            )
        except UserError as error:
            raise config.error(str(error)) from error

    def reach(self, rope: RopeSpec) -> int:
        """Positions that the rope reaches: with yarn, its factor times the original ones."""
        trained = self.max_position_embeddings
        if rope.kind != "yarn":
            return trained
        numbers = rope.parameters
        return max(trained, int(numbers["factor"] * numbers["original_max_position_embeddings"]))

    def layer(self, rope: RopeSpec) -> LayerSpec:
        """A layer; all are alike."""
        heads, kv_heads = self._heads()
        bias = self.config.get(f"{self.section}attention_bias", "flag", False)
        mixer = AttentionSpec(heads, kv_heads, self.head_dim, rope, self.norm, bias, bias)
        return LayerSpec(mixer, DenseMlp(self._whole("intermediate_size")), self.norm)

    def checkpoint(
        self,
        family: str,
        layers: tuple[LayerSpec, ...],
        tensors: Mapping[str, TensorRef],
        *,
        max_position_embeddings: int,
        quantisation: Quantisation | None = None,
        vision: VisionSpec | None = None,
        vision_shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> TargetCheckpoint:
        """The target of ``layers``, whose head is tied where it has none of its own.

        Args:
            tensors: all of the checkpoint, by canonical name.
            vision_shapes: of the tower's tensors.
        Raises:
            UserError: tensors that are missing, surplus or misshapen, by name.
        """
        directory = self.config.file.parent
        tied = tied_head(self.config, tensors, tuple(dict.fromkeys(("", self.section))))
        shapes = decoder_shapes(layers, self.hidden_size, self.vocab_size, tied)
        check_tensors(tensors, {**shapes, **(vision_shapes or {})}, directory)
        head = {"lm_head.weight": tensors["embed_tokens.weight"]} if tied else {}
        scales = quantisation.kv_scales if quantisation else {}
        kv_heads = layers[0].mixer.num_kv_heads
        return TargetCheckpoint(
            family=family,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=max_position_embeddings,
            layers=layers,
            norm=self.norm,
            tied_head=tied,
            eos_token_ids=eos_token_ids(directory, self.config, self.section),
            vision=vision,
            path=directory,
            tensors={**tensors, **head},
            quantisation=quantisation,
            kv_scales=read_kv_scales(scales, len(layers), kv_heads),
        )

    def _heads(self) -> tuple[int, int]:
        heads = self._whole("num_attention_heads")
        return heads, self._whole("num_key_value_heads", heads)

    def _whole(self, key: str, default: int | None = None) -> int:
        return self.config.whole(f"{self.section}{key}", default)
