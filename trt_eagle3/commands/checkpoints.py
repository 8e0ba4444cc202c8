"""Describe checkpoints (``inspect``), and convert drafts (``convert-draft``)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_eagle3.commands.console import (
    json_option,
    override_option,
    print_json,
    show,
)
from trt_eagle3.errors import UserError

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.manifest import DraftManifest
    from trt_eagle3.checkpoint.target import TargetCheckpoint
    from trt_eagle3.spec import TargetSpec

__all__ = ["convert_draft", "inspect"]


@click.command()
@click.argument("target")
@click.argument("draft", required=False)
@override_option
@json_option
def inspect(target: str, draft: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Describe checkpoints: geometry, draft manifest, refusals."""
    from trt_eagle3.commands import report
    from trt_eagle3.drafts.registry import find_draft
    from trt_eagle3.io.assignments import parse_assignments

    if overrides and draft is None:
        raise UserError(
            f"--override {overrides[0]}: a field of a draft, but no draft given. Name one, or "
            "leave it out."
        )
    spec = _target(target)
    manifest = (
        find_draft(draft, spec, parse_assignments(overrides, "--override"))
        if draft is not None
        else None
    )
    if as_json:
        print_json(report.inspection(spec, manifest))
    else:
        show(*report.inspection_lines(spec, manifest))


def _target(checkpoint: str) -> TargetCheckpoint:
    """Read a target; if the path has a draft or a bundle instead, the error names it."""
    from trt_eagle3.checkpoint.source import resolve_checkpoint
    from trt_eagle3.drafts.registry import describe_draft
    from trt_eagle3.engine.bundle.record import BUNDLE_FILE
    from trt_eagle3.families.registry import read_target

    path = resolve_checkpoint(checkpoint)
    try:
        return read_target(path)
    except UserError as error:
        if found := describe_draft(path):
            raise UserError(
                f"{path}: {found}, which needs its target. Run: trt-eagle3 inspect TARGET "
                f"{shlex.quote(checkpoint)}"
            ) from error
        if (path / BUNDLE_FILE).is_file():
            raise UserError(
                f"{path}: a bundle, expected a checkpoint. To describe a bundle: trt-eagle3 doctor "
                f"{shlex.quote(checkpoint)}"
            ) from error
        raise


@click.command("convert-draft")
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["specforge", "speculators", "modelopt", "tensorrt-llm"]),
    help="Write this producer's layout.",
)
@click.option(
    "--target",
    help="The draft's target. It sets defaults; speculators' layout names its architecture.",
)
@override_option
@json_option
def convert_draft(
    source: str,
    destination: Path,
    to: Any,
    target: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Convert a draft to another producer's layout.

    SOURCE is the draft, DESTINATION the folder to write. Its meaning and weights stay the same.
    """
    from trt_eagle3.checkpoint.convert import convert_draft as run
    from trt_eagle3.checkpoint.draft import read_draft
    from trt_eagle3.checkpoint.source import resolve_checkpoint
    from trt_eagle3.drafts.block import CANNOT_CONVERT
    from trt_eagle3.drafts.block import KIND as BLOCK
    from trt_eagle3.families.registry import read_target
    from trt_eagle3.io.assignments import parse_assignments

    path = resolve_checkpoint(source)
    if BLOCK.claims(source, path):
        raise UserError(f"{path}: {CANNOT_CONVERT}")
    spec = read_target(resolve_checkpoint(target)) if target else None
    manifest = read_draft(path, spec, parse_assignments(overrides, "--override"))
    notes = run(manifest, destination, to, _architecture(manifest, spec))
    if as_json:
        print_json({"destination": str(destination), "layout": to, "notes": list(notes)})
    else:
        show(f"wrote {destination} ({to})", *(f"note: {note}" for note in notes))


def _architecture(manifest: DraftManifest, spec: TargetSpec | None) -> str | None:
    """Return the architecture of the draft's target; None if neither argument nor config has it."""
    from trt_eagle3.checkpoint.model_config import read_model_config
    from trt_eagle3.families.registry import FAMILIES, family_named, family_of

    if spec is not None:
        return family_of(spec).architecture
    named = read_model_config(manifest.path).get("target_model_type", "text")
    return family_named(named).architecture if named in FAMILIES else None
