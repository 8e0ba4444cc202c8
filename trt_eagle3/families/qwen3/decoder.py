"""Read the decoder config of Qwen3 and Qwen3-VL as ``LayerSpec``s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from trt_eagle3.checkpoint.experts import gather_experts, matrices
from trt_eagle3.checkpoint.kv_scales import StoredKVScales
from trt_eagle3.checkpoint.model_config import ModelConfig, eos_token_ids, tied_head
from trt_eagle3.checkpoint.quantised.claim import find_claim
from trt_eagle3.checkpoint.quantised.weight import Quantisation, titles
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.checkpoint.target_tensors import check_tensors, decoder_shapes
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.errors import quote
from trt_eagle3.families.qwen3.sparse_layers import SparseLayers
from trt_eagle3.families.qwen3.zero_biases import without_zero_biases
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, NormSpec, RopeSpec, VisionSpec

__all__ = ["DecoderConfig"]


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder in a section of a config.

    Attributes:
        default_eps, default_theta: of a config without ``rms_norm_eps`` or ``rope_theta``; theta
            None: the config must name it.
        section: its dotted prefix (``text_config.``).
        sparse: reads the mixture of experts of a sparse layer; None: all layers are dense.
    """

    default_eps: ClassVar[float] = 1e-6
    default_theta: ClassVar[float | None] = None

    config: ModelConfig
    section: str = ""
    sparse: SparseLayers | None = None

    @property
    def tie_sections(self) -> tuple[str, ...]:
        """Sections whose ``tie_word_embeddings`` counts if the checkpoint has no head."""
        return tuple(dict.fromkeys(("", self.section)))

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
        """Positions that the decoder was trained for."""
        return self._whole("max_position_embeddings")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self._whole("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        """Channels of a head.

        transformers' default is 128 in dense models, and hidden_size / heads in mixtures of
        experts.
        """
        default = 128 if self.sparse is None else self.hidden_size // self._heads()[0]
        return self._whole("head_dim", default)

    @property
    def norm(self) -> NormSpec:
        """The norm that all places share."""
        eps = self.config.get(f"{self.section}rms_norm_eps", "number", self.default_eps)
        if not 0 <= eps < 1:
            raise self.config.error(
                f"{self.section}rms_norm_eps: expected a small number, got {eps}"
            )
        return NormSpec(float(eps))

    def check(self) -> None:
        """Check that this program can compute the decoder."""
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

    def layers(self, rope: RopeSpec) -> tuple[LayerSpec, ...]:
        """Return the layers, which differ only in the MLP."""
        heads, kv_heads = self._heads()
        bias = self.config.get(f"{self.section}attention_bias", "flag", False)
        mixer = AttentionSpec(heads, kv_heads, self.head_dim, rope, self.norm, bias, bias)
        moe = None if self.sparse is None else self.sparse.moe(self.config, self.section)
        sparse = [] if self.sparse is None else self.sparse.indices(self.config, self.section)
        dense = None
        if len(sparse) < self.num_layers:
            dense = DenseMlp(self._whole("intermediate_size"))
        mlps = (moe if i in sparse else dense for i in range(self.num_layers))
        return tuple(LayerSpec(mixer, mlp, self.norm) for mlp in mlps if mlp is not None)

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
        """Create the target of ``layers``. Its head is tied if the checkpoint has no head.

        Args:
            tensors: all of the checkpoint, by canonical name.
            vision_shapes: shapes of the tower's tensors.
        Raises:
            UserError: tensors are missing, surplus or misshapen. The message names them.
        """
        directory = self.config.file.parent
        tensors = gather_experts(tensors, layers, self.hidden_size, directory, self.fp8_block())
        if quantisation is not None:
            quantisation = replace(quantisation, weights=titles(matrices(tensors.values())))
        tied = tied_head(self.config, tensors, self.tie_sections)
        shapes = {**self.shapes(layers, tied), **(vision_shapes or {})}
        tensors = without_zero_biases(tensors, shapes)
        check_tensors(tensors, shapes, directory)
        head = {"lm_head.weight": tensors["embed_tokens.weight"]} if tied else {}
        scales = quantisation.kv_scales if quantisation else {}
        _, kv_heads = self._heads()
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
            kv_scales=StoredKVScales(scales, len(layers), kv_heads),
        )

    def shapes(self, layers: Sequence[LayerSpec], tied_head: bool) -> dict[str, tuple[int, ...]]:
        """Return canonical name and shape of every tensor of the decoder and its head."""
        return decoder_shapes(layers, self.hidden_size, self.vocab_size, tied_head)

    def fp8_block(self) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale of an FP8 weight, if configured."""
        claim = find_claim(self.config, tuple(dict.fromkeys(("", self.section))))
        block = None if claim is None else claim.get("weight_block_size", "wholes")
        return None if block is None else (block[0], block[1])

    def _heads(self) -> tuple[int, int]:
        heads = self._whole("num_attention_heads")
        return heads, self._whole("num_key_value_heads", heads)

    def _whole(self, key: str, default: int | None = None) -> int:
        return self.config.whole(f"{self.section}{key}", default)
