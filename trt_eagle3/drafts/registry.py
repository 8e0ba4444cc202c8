"""Find a draft's kind. A kind is a folder here and a line in ``KINDS``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.manifest import manifest_from_dict as manifest_of_kind
from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.drafts.kind import DraftKind
from trt_eagle3.errors import UserError, quote

__all__ = [
    "DRAFT_GRAPHS",
    "KINDS",
    "describe_draft",
    "find_draft",
    "kind_named",
    "kind_of",
    "manifest_from_dict",
    "read_draft",
]

KINDS = {
    "mtp": "trt_eagle3.drafts.mtp:KIND",
    "block": "trt_eagle3.drafts.block:KIND",
    "eagle3": "trt_eagle3.drafts.eagle3:KIND",
}
"""``DraftManifest.kind`` -> its place.

The kinds are tested in this order for a draft. The last accepts every draft.
"""


DRAFT_GRAPHS = ("fuse", "draft", "context", "block")
"""Names of the graphs of all kinds (``DraftKind.graph_names``)."""


def find_draft(
    checkpoint: str,
    target: TargetCheckpoint,
    overrides: Mapping[str, Any],
    revision: str | None = None,
) -> DraftManifest:
    """Read the draft that ``draft.checkpoint`` names.

    Raises:
        UserError: there is no draft, or it does not belong to ``target``.
    """
    kinds = [kind_named(name) for name in KINDS]
    for kind in kinds:
        if kind.in_target and kind.claims(checkpoint, target.path):
            return read_draft(kind, target.path, target, overrides)
    path = resolve_checkpoint(checkpoint, revision)
    if path.resolve() == target.path.resolve():
        head = "To draft with its MTP head: draft.checkpoint: mtp." if target.mtp else ""
        raise UserError(
            f"draft.checkpoint: {checkpoint}: the target itself. {head or 'Name a draft.'}"
        )
    kind = next(k for k in kinds if not k.in_target and k.claims(checkpoint, path))
    return read_draft(kind, path, target, overrides)


def describe_draft(folder: Path) -> str:
    """Describe the draft in ``folder`` for messages; empty if there is none."""
    return next(filter(None, (kind_named(name).describe(folder) for name in KINDS)), "")


def read_draft(
    kind: DraftKind, path: Path, target: TargetCheckpoint, overrides: Mapping[str, Any]
) -> DraftManifest:
    """Read the draft in ``path``. If it has no head, add the target's head to its tensors.

    Raises:
        UserError: as for ``find_draft``.
    """
    manifest = kind.read(path, target, overrides)
    if manifest.head == "own":
        return manifest
    head = target.tensors["lm_head.weight"]
    return dataclasses.replace(manifest, tensors={**manifest.tensors, "lm_head.weight": head})


def kind_of(manifest: DraftManifest) -> DraftKind:
    """Return the kind of a draft."""
    return kind_named(manifest.kind)


@cache
def kind_named(name: str) -> DraftKind:
    """Return a kind by ``DraftManifest.kind``.

    Raises:
        UserError: there is no such kind.
    """
    if name not in KINDS:
        raise UserError(
            f"draft kind: expected one of {', '.join(KINDS)}, got {quote(name, 80)}. "
            "Rebuild the bundle, or update trt-eagle3."
        )
    module, attribute = KINDS[name].split(":")
    kind: DraftKind = getattr(import_module(module), attribute)
    return kind


def manifest_from_dict(plain: Mapping[str, Any]) -> DraftManifest:
    """Read the manifest that ``manifest_to_dict`` wrote; it has no tensors.

    Bundles that name no kind have EAGLE-3 drafts.
    """
    return manifest_of_kind(kind_named(str(plain.get("kind", "eagle3"))).manifest, plain)
