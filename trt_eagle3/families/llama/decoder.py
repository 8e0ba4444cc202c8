"""Llama's decoder: Qwen3's without norms of the heads of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, RopeSpec

__all__ = ["LlamaDecoder"]


@dataclass(frozen=True)
class LlamaDecoder(DecoderConfig):
    """The decoder in a section of a config."""

    default_theta: ClassVar[float | None] = 1e4

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        heads, _ = self._heads()
        return self._whole("head_dim", self.hidden_size // heads)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether q, k and v have biases, and whether the output projection has one."""
        bias = bool(self.config.get(f"{self.section}attention_bias", "flag", False))
        return bias, bias

    def check(self) -> None:
        """Check that this program can compute the decoder."""
        heads, _ = self._heads()
        if self.hidden_size % heads:
            raise self.config.error(
                f"{self.section}hidden_size: expected a multiple of the {heads} heads, got "
                f"{self.hidden_size}"
            )
        super().check()

    def layers(self, rope: RopeSpec) -> tuple[LayerSpec, ...]:
        """Return the layers, which are all equal."""
        mixer = AttentionSpec(*self._heads(), self.head_dim, rope, None, *self.biases)
        layer = LayerSpec(mixer, DenseMlp(self._whole("intermediate_size")), self.norm)
        return (layer,) * self.num_layers
