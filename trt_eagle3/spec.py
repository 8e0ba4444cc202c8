"""What a model is, of any family, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["StateKind", "StateSpec"]

StateKind = Literal["paged", "per_sequence"]


@dataclass(frozen=True)
class StateSpec:
    """A state that a layer keeps between forwards; a graph lists its states in its metadata.

    Attributes:
        name: of the graph's input; the output that updates it is called ``<name>_out`` with the
            layer's suffix kept last (``k_cache.3`` -> ``k_cache_out.3``).
        kind: ``paged``: one row per token, in pages; ``per_sequence``: one entry per sequence.
        shape: of one row or one entry, without the leading dimension.
        dtype: name of the element type (``float32``, ``float16``, ``bfloat16``).
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    dtype: str

    @property
    def output_name(self) -> str:
        """Name of the graph's output that updates the state."""
        stem, dot, layer = self.name.partition(".")
        return f"{stem}_out{dot}{layer}"
