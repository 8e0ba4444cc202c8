"""Interpretations: changes to ambiguous fields of a manifest, and the table of those fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trt_eagle3.checkpoint.manifest import (
    AutoregressiveManifest,
    DraftManifest,
    autoregressive,
)
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.spec import RopeSpec, TargetSpec

__all__ = [
    "Change",
    "Factor",
    "Interpretation",
    "alternatives",
    "candidate_layers",
    "choice",
    "deepstack",
    "embedding",
    "image_rows",
    "positions",
    "takes_norm",
]

Change = Mapping[str, Any]
"""Manifest field -> value; ``rope.layout``, ``rope.sections``, ``rope.kind`` and ``rope.base`` are
parts of a rope.
"""

Factor = Callable[[DraftManifest, TargetSpec], Iterator[Change]]
"""An ambiguity of draft files: yields its possible values, the manifest's own included."""


@dataclass(frozen=True)
class Interpretation:
    """Changes to a manifest by field, sorted by name; without changes it is the manifest itself."""

    changes: tuple[tuple[str, Any], ...] = ()

    def changed(self, change: Change, manifest: DraftManifest) -> Interpretation:
        """Return this interpretation with ``change``; values equal to ``manifest`` are dropped."""
        merged = {**dict(self.changes), **change}
        own = manifest.image_rows if isinstance(manifest, AutoregressiveManifest) else None
        if merged.get("image_rows", own) == "pad":
            merged.pop("image_rows_rotated", None)
        kept = {field: value for field, value in merged.items() if _value(manifest, field) != value}
        return Interpretation(tuple(sorted(kept.items())))

    def without(self, fields: frozenset[str]) -> Interpretation:
        """Return this interpretation without changes to ``fields``."""
        return Interpretation(
            tuple((field, value) for field, value in self.changes if field not in fields)
        )

    def apply(self, manifest: DraftManifest) -> DraftManifest:
        """Return ``manifest`` with the changes of this interpretation."""
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
    """Return ``rope`` with ``changes``.

    A changed kind or base gives a rope without scaling. A changed layout alone assigns the same
    frequencies to other axes.
    """
    layout, sections = changes.get("layout", rope.layout), changes.get("sections", rope.sections)
    if changes.keys() & {"kind", "base"}:
        return RopeSpec.plain(
            2 * len(rope.inv_freq), changes.get("base", rope.base), layout, sections
        )
    return dataclasses.replace(rope, layout=layout, sections=sections)


def positions(manifest: DraftManifest, _spec: TargetSpec) -> Iterator[Change]:
    """Yield linear positions, and the target's."""
    yield {"positions": "linear"}
    own = autoregressive(manifest).positions
    yield {"positions": own if own != "linear" else "3d"}


def image_rows(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """Yield the possible contents of image rows."""
    if spec.vision is None:
        return
    yield {"image_rows": "pad"}
    if manifest.hidden_size == spec.hidden_size:
        for rotated in (True, False):
            yield {"image_rows": "vision", "image_rows_rotated": rotated}


def embedding(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
    """Yield the target's table in place of the draft's own, which some trainers save untrained."""
    if manifest.embedding == "own" and manifest.hidden_size == spec.hidden_size:
        yield {"embedding": "target"}


def deepstack(aux_layers: Factor) -> Factor:
    """Return a factor for the point at which out(k) is taken, if a visual level is added there.

    Args:
        aux_layers: the factor of the layers k.
    """

    def factor(manifest: DraftManifest, spec: TargetSpec) -> Iterator[Change]:
        changes = ({}, *aux_layers(manifest, spec))
        taken = {k for change in changes for k in change.get("aux_layers", manifest.aux_layers)}
        if any(spec.layers[k].visual_level is not None for k in taken):
            yield {"aux_pre_deepstack": not manifest.aux_pre_deepstack}

    return factor


def choice(field: str, *values: Any) -> Factor:
    """Return a factor with these ``values`` of ``field``."""
    return lambda _manifest, _spec: iter([{field: value} for value in values])


def alternatives(manifest: DraftManifest, spec: TargetSpec) -> dict[str, list[Change]]:
    """Return by factor the changes that a draft file may need; skip factors without changes."""
    factors = kind_of(manifest).factors()
    found = {name: list(candidates(manifest, spec)) for name, candidates in factors.items()}
    return {name: changes for name, changes in found.items() if changes}


def candidate_layers(manifest: DraftManifest, spec: TargetSpec) -> tuple[int, ...]:
    """Return every target layer whose output some interpretation reads."""
    changes = [change for several in alternatives(manifest, spec).values() for change in several]
    taken = {k for change in ({}, *changes) for k in change.get("aux_layers", manifest.aux_layers)}
    return tuple(sorted(taken))


def takes_norm(manifest: DraftManifest, spec: TargetSpec) -> bool:
    """Return whether some interpretation reads the target's last hidden state after its norm."""
    changes = [change for several in alternatives(manifest, spec).values() for change in several]
    read = [Interpretation().changed(change, manifest) for change in ({}, *changes)]
    return any(interpretation.apply(manifest).takes_normed for interpretation in read)
