"""Read the positions of a decoder's config: sliding windows, and a rope of one axis."""

from __future__ import annotations

from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3.decoder import DecoderConfig
from trt_eagle3.spec import RopeSpec

__all__ = ["check_full_attention", "plain_rope", "reach"]


def check_full_attention(decoder: DecoderConfig, first: int) -> None:
    """Check that no layer has a sliding window.

    Without ``layer_types``, transformers lets layers from ``max_window_layers`` on slide. The
    default is ``first``.
    """
    config, section, num_layers = decoder.config, decoder.section, decoder.num_layers
    slides = config.get(f"{section}use_sliding_window", "flag", False)
    kinds = config.get(f"{section}layer_types", "texts", [])
    if kinds and len(kinds) != num_layers:
        raise config.error(f"{section}layer_types: expected {num_layers} of them, got {len(kinds)}")
    windowed = any(kind != "full_attention" for kind in kinds)
    if not kinds:
        most = config.whole(f"{section}max_window_layers", first, least=0)
        windowed = slides and most < num_layers
    if windowed:
        raise config.error(
            f"{section}sliding window attention (use_sliding_window, layer_types): not supported. "
            "Set use_sliding_window to false only if the checkpoint was trained without it."
        )


def plain_rope(decoder: DecoderConfig) -> RopeSpec:
    """Build a one-axis rope by the schedule that the config names."""
    config, section = decoder.config, decoder.section
    values = config.get(section[:-1], "object") if section else config.values
    rope = read_rope_config(values, config.file)
    base = decoder.default_theta if rope.base is None else rope.base
    if base is None or base <= 1:
        raise config.error(
            f"{section}rope_theta: expected a number above 1, got {base}. Write the one it "
            "was trained with."
        )
    if rope.kind() == "dynamic":
        raise config.error(
            f"{section}rope_type dynamic: not supported. Use yarn, or no rope_scaling."
        )
    try:
        return make_rope(
            rope.kind(),
            base,
            decoder.head_dim,
            parameters=rope.values,
            max_positions=decoder.max_position_embeddings,
        )
    except UserError as error:
        raise config.error(str(error)) from error


def reach(decoder: DecoderConfig, rope: RopeSpec) -> int:
    """Return the positions that the rope supports: with yarn, its factor times the original."""
    trained = decoder.max_position_embeddings
    if rope.kind != "yarn":
        return trained
    numbers = rope.parameters
    return max(trained, int(numbers["factor"] * numbers["original_max_position_embeddings"]))
