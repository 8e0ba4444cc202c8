"""Read a Llama checkpoint, in every spelling of its config, and check its tensors."""

from __future__ import annotations

from trt_eagle3.checkpoint.model_config import ModelConfig
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.families.llama.decoder import LlamaDecoder
from trt_eagle3.families.qwen3.reader import read_text_target

__all__ = ["check_llama", "read_llama"]


def read_llama(config: ModelConfig) -> TargetCheckpoint:
    """Read a text-only Llama checkpoint.

    Raises:
        UserError: its kind is not supported (a classifier, a sliding window, biases of the MLP), or
            its tensors do not fit.
    """
    decoder = LlamaDecoder(config)
    check_llama(decoder)
    return read_text_target(decoder, "llama", "Llama", "LlamaForCausalLM")


def check_llama(decoder: LlamaDecoder) -> None:
    """Check that the MLP has no biases and that no layer has a sliding window.

    Raises:
        UserError: it has.
    """
    _check_plain_mlp(decoder)
    _check_no_window(decoder)


def _check_plain_mlp(decoder: LlamaDecoder) -> None:
    """Check that the MLP has no biases."""
    config, section = decoder.config, decoder.section
    if config.get(f"{section}mlp_bias", "flag", False):
        raise config.error(
            f"{section}mlp_bias: expected false, got true: not supported. Use a checkpoint without "
            "biases in its MLP."
        )


def _check_no_window(decoder: LlamaDecoder) -> None:
    """Check that no key names a sliding window, which transformers' Llama ignores."""
    config, section = decoder.config, decoder.section
    switch = config.get(f"{section}use_sliding_window", "flag")
    window = config.get(f"{section}sliding_window", "any")
    kinds = config.get(f"{section}layer_types", "texts", [])
    slides = window is not None if switch is None else switch
    if slides or any(kind != "full_attention" for kind in kinds):
        raise config.error(
            f"{section}sliding window attention (sliding_window, use_sliding_window, layer_types): "
            "not supported. Remove these keys only if the checkpoint was trained without a window."
        )
