"""Qwen2's decoder: Llama's with biases of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass

from trt_eagle3.families.llama.decoder import LlamaDecoder

__all__ = ["Qwen2Decoder"]


@dataclass(frozen=True)
class Qwen2Decoder(LlamaDecoder):
    """The decoder in a section of a config."""

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether q, k and v have biases, and whether the output projection has one."""
        return True, False
