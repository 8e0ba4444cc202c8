"""Qwen2.5's decoder: Qwen3's with biases of q, k and v, and without norms of their heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.spec import AttentionSpec, DenseMlp, LayerSpec, RopeSpec

__all__ = ["Qwen2Decoder"]


@dataclass(frozen=True)
class Qwen2Decoder(DecoderConfig):
    """The decoder in a section of a config."""

    default_eps: ClassVar[float] = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        heads, _ = self._heads()
        return self.hidden_size // heads

    def check(self) -> None:
        """Check that this program can compute the decoder."""
        super().check()
        heads, _ = self._heads()
        if self.hidden_size % heads:
            raise self.config.error(
                f"{self.section}hidden_size: expected whole heads, got {self.hidden_size} channels "
                f"for {heads}"
            )

    def layers(self, rope: RopeSpec) -> tuple[LayerSpec, ...]:
        """Return the layers, which are all equal."""
        heads, kv_heads = self._heads()
        mixer = AttentionSpec(heads, kv_heads, self.head_dim, rope, None, True, False)
        layer = LayerSpec(mixer, DenseMlp(self._whole("intermediate_size")), self.norm)
        return (layer,) * self.num_layers
