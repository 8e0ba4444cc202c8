"""Interpretations: a manifest with some of its ambiguous fields read another way, and the table
of what may be ambiguous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.spec import RopeSpec, TargetSpec

__all__ = ["FACTORS", "Interpretation", "alternatives", "candidate_layers"]

Change = Mapping[str, Any]
"""Manifest field -> value; ``rope.layout``, ``rope.sections``, ``rope.kind`` and ``rope.base``
are parts of a rope.
"""

# of EAGLE's own code, of Qwen2-VL and of Qwen3-VL
ROPE_BASES = (10_000.0, 1_000_000.0, 5_000_000.0)


@dataclass(frozen=True)
class Interpretation:
    """Changes to a manifest, by field, in the order of their names; none is the manifest as it
    stands.
    """

    changes: tuple[tuple[str, Any], ...] = ()

    def changed(self, change: Change, manifest: DraftManifest) -> Interpretation:
        """This interpretation with ``change`` on top; what ``manifest`` says anyway is left out."""
        merged = {**dict(self.changes), **change}
        if merged.get("image_rows", manifest.image_rows) == "pad":
            merged.pop("image_rows_rotated", None)
        kept = {field: value for field, value in merged.items() if _value(manifest, field) != value}
        return Interpretation(tuple(sorted(kept.items())))

    def without(self, fields: frozenset[str]) -> Interpretation:
        """This interpretation with ``fields`` as the manifest has them."""
        return Interpretation(
            tuple((field, value) for field, value in self.changes if field not in fields)
        )

    def apply(self, manifest: DraftManifest) -> DraftManifest:
        """The manifest that this interpretation makes of ``manifest``."""
        rope = {
            f.removeprefix("rope."): value for f, value in self.changes if f.startswith("rope.")
        }
        fields = {f: value for f, value in self.changes if not f.startswith("rope.")}
        if rope:
            fields["rope"] = _rope(manifest.rope, rope)
        return dataclasses.replace(manifest, **fields)


def _value(manifest: DraftManifest, field: str) -> Any:
    owner, _, part = field.rpartition(".")
    return getattr(getattr(manifest, owner) if owner else manifest, part)


def _rope(rope: RopeSpec, changes: Mapping[str, Any]) -> RopeSpec:
    """A schedule that is changed becomes a plain one; a layout alone deals the same frequencies
    to other axes.
    """
    layout, sections = changes.get("layout", rope.layout), changes.get("sections", rope.sections)
    if changes.keys() & {"kind", "base"}:
        return RopeSpec.plain(
            2 * len(rope.inv_freq), changes.get("base", rope.base), layout, sections
        )
    return dataclasses.replace(rope, layout=layout, sections=sections)


def _aux_layers(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """One layer up and down (state ids read as output ids, and the reverse), and what producers
    take by default.
    """
    layers, n = manifest.aux_layers, spec.num_layers
    shifted = [tuple(k + step for k in layers) for step in (-1, 1)]
    for other in (*shifted, (1, n // 2 - 1, n - 4), (2, n // 2, n - 3)):
        if len(other) == len(layers) and min(other) >= 0 and max(other) < n:
            yield {"aux_layers": other}


def _aux_pre_deepstack(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    if any(
        spec.layers[k].visual_level is not None
        for change in ({}, *_aux_layers(manifest, spec))
        for k in _layers(manifest, change)
    ):
        yield {"aux_pre_deepstack": not manifest.aux_pre_deepstack}


def _layers(manifest: DraftManifest, change: Change) -> tuple[int, ...]:
    return tuple(change.get("aux_layers", manifest.aux_layers))


def _rope_schedule(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    for base in dict.fromkeys((*ROPE_BASES, manifest.rope.base, spec.attention.rope.base)):
        yield {"rope.kind": "default", "rope.base": base}


def _rope_layout(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """One axis, or three with the draft's own sections, else the target's where they fit."""
    yield {"rope.layout": "1d", "rope.sections": ()}
    positions = {} if manifest.positions == "linear" else {"positions": "3d"}
    sections = manifest.rope.sections or spec.attention.rope.sections
    if sections and 2 * sum(sections) == manifest.head_dim:
        for layout in ("chunked", "interleaved"):
            yield {"rope.layout": layout, "rope.sections": tuple(sections), **positions}


def _positions(manifest: DraftManifest, _spec: TargetSpec) -> Iterator[Change]:
    yield {"positions": "linear"}
    yield {"positions": manifest.positions if manifest.positions != "linear" else "3d"}


def _image_rows(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    if spec.vision is None:
        return
    yield {"image_rows": "pad"}
    if manifest.hidden_size == spec.hidden_size:
        for rotated in (True, False):
            yield {"image_rows": "vision", "image_rows_rotated": rotated}


def _choice(field: str, *values: Any) -> Callable[[DraftManifest, TargetSpec], Iterator[Change]]:
    return lambda _manifest, _spec: iter([{field: value} for value in values])


FACTORS: Mapping[str, Callable[[DraftManifest, TargetSpec], Iterator[Change]]] = {
    # those that leave the draft's graph as it is come first: its session is kept while they are
    # scored
    "aux offset": _aux_layers,
    "deepstack": _aux_pre_deepstack,
    "image rows": _image_rows,
    "positions": _positions,
    "position shift": _choice("position_shift", 0, 1),
    "rope schedule": _rope_schedule,
    "rope layout": _rope_layout,
    "residual": _choice("residual", "hidden", "normed"),
    "feedback": _choice("feedback", "pre_norm", "post_norm"),
    "first norm": _choice("first_norm", "single", "double"),
}
"""What is ambiguous in draft files -> the values that it may have, the manifest's own among
them.
"""


def alternatives(manifest: DraftManifest, spec: TargetSpec) -> dict[str, list[Change]]:
    """Per factor the changes that some file, somewhere, would need; factors without any are left
    out.
    """
    found = {name: list(candidates(manifest, spec)) for name, candidates in FACTORS.items()}
    return {name: changes for name, changes in found.items() if changes}


def candidate_layers(manifest: DraftManifest, spec: TargetSpec) -> tuple[int, ...]:
    """Every target layer whose output some interpretation takes."""
    taken = {k for change in ({}, *_aux_layers(manifest, spec)) for k in _layers(manifest, change)}
    return tuple(sorted(taken))
