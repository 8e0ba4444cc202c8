"""Resolve who sees whom in each layer of a block draft: causal or not, and the window."""

from __future__ import annotations

from trt_eagle3.checkpoint.manifest import SourceKind
from trt_eagle3.checkpoint.producer import geometry_section
from trt_eagle3.checkpoint.resolved_fields import ResolvedFields
from trt_eagle3.drafts.block.manifest import BlockLayer
from trt_eagle3.drafts.block.producer import BlockProducer
from trt_eagle3.errors import quote

__all__ = ["resolve_attention"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIX = "Correct config.json, or set draft.overrides.layers."


def resolve_attention(fields: ResolvedFields, producer: BlockProducer) -> None:
    """Put ``layers`` and ``window_rule``.

    Raises:
        UserError: the keys contradict each other or the number of layers, or a window is missing.
    """
    detail = {
        "row": "row q sees slot k if |q - k| < window",
        "anchor": "every row sees the context from anchor - window on",
    }[producer.window_rule]
    fields.put("window_rule", producer.window_rule, "convention", f"{producer.name}: {detail}")
    if "layers" in fields.values:
        given = len(fields.values["layers"])
        if given != fields.values["num_layers"]:
            raise fields.error(
                f"draft.overrides.layers: expected {fields.values['num_layers']} layers, got "
                f"{given}"
            )
        return
    windows, why = _windows(fields)
    causal, kind, reason = _causal(fields, producer)
    layers = tuple(BlockLayer(causal=causal[bool(window)], window=window) for window in windows)
    fields.put("layers", layers, kind, f"{why}; {reason}")


def _windows(fields: ResolvedFields) -> tuple[tuple[int, ...], str]:
    """Return the window of each layer, 0 if none, and the keys that were read."""
    count, where = fields.values["num_layers"], geometry_section(fields)
    prefix = f"{where}." if where else ""
    if fields.files.find("dflash_config.use_swa", "flag"):
        return _of_all_layers(fields, count)
    types = fields.files.find(f"{prefix}layer_types", "texts")
    if types is None:
        return _by_number(fields, prefix, count)
    unknown = next((t for t in types if t not in {_FULL, _SLIDING}), None)
    if unknown is not None:
        raise fields.error(
            f"layer_types: expected {_FULL} or {_SLIDING}, got {quote(unknown)}: not supported"
        )
    if len(types) != count:
        raise fields.error(f"layer_types: expected {count}, got {len(types)}. {_FIX}")
    if _SLIDING not in types:
        return (0,) * count, "layer_types: all full"
    key = f"{prefix}sliding_window"
    window = fields.files.find(key, "whole")
    if not window or fields.files.find(f"{prefix}use_sliding_window", "flag") is False:
        what = "use_sliding_window is false" if window else f"there is no {key}"
        raise fields.error(f"layer_types has {_SLIDING}, but {what}. {_FIX}")
    sliding = types.count(_SLIDING)
    return (
        tuple(window if t == _SLIDING else 0 for t in types),
        f"layer_types: {sliding} of {count} slide, {key} {window}",
    )


def _of_all_layers(fields: ResolvedFields, count: int) -> tuple[tuple[int, ...], str]:
    """Return the windows of a file with ``use_swa``: every layer slides, whatever its type."""
    keys = ("dflash_config.swa_window_size", "sliding_window")
    found = fields.agree("layers", {key: fields.files.find(key, "whole") for key in keys})
    if not found or not found[0]:
        raise fields.error(f"dflash_config.use_swa is true, but there is no {keys[0]}. {_FIX}")
    return (found[0],) * count, f"dflash_config.use_swa: every layer slides, {found[1]} {found[0]}"


def _by_number(fields: ResolvedFields, prefix: str, count: int) -> tuple[tuple[int, ...], str]:
    """Return the windows of a file without ``layer_types``, as transformers' Qwen3 derives them."""
    window = fields.files.find(f"{prefix}sliding_window", "whole") or 0
    if not window or not fields.files.find(f"{prefix}use_sliding_window", "flag"):
        return (0,) * count, "layer_types is absent: all full"
    first = fields.files.find(f"{prefix}max_window_layers", "whole")
    first = 28 if first is None else first
    windows = tuple(window if i >= first else 0 for i in range(count))
    return windows, f"layer_types is absent: layers from max_window_layers {first} on slide"


def _causal(
    fields: ResolvedFields, producer: BlockProducer
) -> tuple[tuple[bool, bool], SourceKind, str]:
    """Return whether a full and a sliding layer are causal within the block, and the source."""
    key = "sliding_window_non_causal"
    if producer.window_rule == "anchor":
        told = fields.files.find(key, "flag")
        if told is None:
            told = fields.values["method"] == "dflash2"
        # full layers never are, whatever the key
        return (False, not told), "config", f"{key} {told}: for sliding layers alone"
    keys = ("is_causal", "dflash_config.causal")
    found = fields.agree("layers", {k: fields.files.find(k, "flag") for k in keys})
    if found:
        return (found[0], found[0]), "config", f"{found[1]} {found[0]}"
    return (False, True), "config", "no is_causal: sliding layers are causal, full layers are not"
