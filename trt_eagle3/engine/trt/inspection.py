"""Inspect a built engine: write its layers to a file, and check it for copies of our inputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_eagle3.atomic_io import write_file
from trt_eagle3.engine.builder.job import BuiltEngine
from trt_eagle3.engine.trt.dialects.dialect import Dialect, Inspection
from trt_eagle3.engine.trt.profiles import Profile
from trt_eagle3.errors import TrtEagle3Error, UserError
from trt_eagle3.graph.ops import EVERY_OP
from trt_eagle3.spec import StateSpec

__all__ = [
    "INSPECTION_FILE",
    "CopiesCacheError",
    "check_prefetch_safe",
    "check_states_in_place",
    "write_inspection",
]

INSPECTION_FILE = "inspection.json"
# inputs that may be read early: caches, page table and lengths; the convolution's weight, states,
# entries and mask
_READ_EARLY = {
    "TreeAttention": (slice(3, 8),),
    "GatedDelta": (slice(2, 3), slice(6, 12)),
}
_PRODUCTS = ("Linear", "LinearFp8", "LinearInt8", "LinearInt4")  # inputs: x, then constants
_PLUGIN_LAYERS = ("plugin", "custom_layer")  # single, and within a graph that TensorRT compiles


class CopiesCacheError(TrtEagle3Error):
    """The engine copies an input in every step that its attention would read early."""


def write_inspection(
    dialect: Dialect,
    engine_file: Path,
    found: Inspection,
    profiles: Sequence[Profile],
    packed: Mapping[str, int],
    seconds: float,
) -> BuiltEngine:
    """Write the engine's layers and facts to a file next to it, and return a summary; ``packed``:
    number of its quantised weights by type.
    """
    plugins = Counter(plugin for layer in found.layers if (plugin := _plugin_of(layer)))
    built = BuiltEngine(
        num_bytes=engine_file.stat().st_size,
        seconds=seconds,
        num_layers=len(found.layers),
        num_plugins=plugins.total(),
        device_bytes=found.device_bytes,
    )
    facts = {
        dialect.package: dialect.version,
        "seconds": round(seconds, 1),
        "engine_bytes": built.num_bytes,
        "device_memory_bytes": built.device_bytes,
        "plugins": dict(plugins),
        "packed_weights": dict(packed),
        "copied_inputs": list(found.copied_inputs),
        "profiles": {profile.name: profile.shapes for profile in profiles},
        "layers": found.layers,
    }
    write_file(engine_file.with_name(INSPECTION_FILE), json.dumps(facts, indent=1).encode())
    return built


def check_states_in_place(
    engine_file: Path, copied: Collection[str], states: Iterable[StateSpec]
) -> None:
    """Refuse an engine that copies a state (``k_cache.0``) in every step.

    Raises:
        UserError: the engine copies one.
    """
    if name := next((state.name for state in states if state.name in copied), None):
        raise UserError(
            f"{engine_file}: TensorRT copies {name} at every step instead of updating it in place. "
            "Build with another TensorRT, and report this one's version."
        )


def check_prefetch_safe(engine_file: Path, layers: Sequence[Any], early: bool) -> None:
    """Refuse an engine that, in every step, copies a tensor which a plugin may read too early.

    Args:
        early: layers were built to read their states and the states' locations early.
    Raises:
        CopiesCacheError: the engine copies such a state or location. UserError: it copies a weight
            of a product.
    """
    for plugin in _PRODUCTS:
        if weight := _copied(layers, plugin, slice(1, None)):
            raise UserError(
                f"{engine_file}: TensorRT copies {weight} at every step, which our product may "
                "read too early. Set engine.tensorrt.linear: tensorrt."
            )
    for plugin, inputs in _READ_EARLY.items() if early else ():
        if cache := next(filter(None, (_copied(layers, plugin, some) for some in inputs)), None):
            raise CopiesCacheError(
                f"{engine_file}: TensorRT copies {cache} at every step, which {plugin} reads early"
            )


def _copied(layers: Sequence[Any], plugin: str, inputs: slice) -> str | None:
    """Return the first of ``inputs`` of a ``plugin`` layer that another layer copies."""
    known = [layer for layer in layers if isinstance(layer, dict)]
    reformats = (layer for layer in known if layer.get("LayerType") == "Reformat")
    copies = {tensor["Name"] for layer in reformats for tensor in layer.get("Outputs", [])}
    readers = (layer for layer in known if _plugin_of(layer) == plugin)
    read = (tensor["Name"] for r in readers for tensor in r.get("Inputs", [])[inputs])
    return next((name for name in read if name in copies), None)


def _plugin_of(layer: Any) -> str | None:
    """Return which of our ops a layer implements. A layer is a mapping, or only a name if TensorRT
    gives no more.
    """
    if not isinstance(layer, dict):
        return _named_in(str(layer))
    if not str(layer.get("LayerType", "")).lower().startswith(_PLUGIN_LAYERS):
        return None
    # search the layer's own name before its inputs
    texts = (str(layer.get("Name", "")), json.dumps(layer))
    return next((name for text in texts if (name := _named_in(text))), None)


def _named_in(text: str) -> str | None:
    """Return our op that ``text`` names; the longest match, as one name is a prefix of another."""
    return max((name for name in EVERY_OP if name in text), key=len, default=None)
