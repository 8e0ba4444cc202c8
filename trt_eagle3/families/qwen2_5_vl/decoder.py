"""Qwen2.5-VL's decoder: Qwen2's, whose head size follows from the width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trt_eagle3.families.qwen2.decoder import Qwen2Decoder

__all__ = ["Qwen25Decoder"]


@dataclass(frozen=True)
class Qwen25Decoder(Qwen2Decoder):
    """The decoder in a section of a config."""

    default_eps: ClassVar[float] = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of a head; transformers ignores the config's ``head_dim``."""
        heads, _ = self._heads()
        return self.hidden_size // heads
