"""Find the checkpoints of a bundle, and check that the bundle was built from them."""

from __future__ import annotations

from pathlib import Path

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.source import resolve_checkpoint
from trt_eagle3.checkpoint.target import TargetCheckpoint, target_to_dict
from trt_eagle3.drafts.registry import kind_of, read_draft
from trt_eagle3.engine.builder.weight_quantiser import made_location, made_target
from trt_eagle3.engine.bundle.check import header_digest
from trt_eagle3.engine.bundle.weight_locations import TABLE_FILE
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.record.engine import RecordingEngine

__all__ = ["find_checkpoint", "read_sources", "read_unquantised"]


def find_checkpoint(engine: RecordingEngine, role: str, given: str | None = None) -> Path:
    """Return the checkpoint of ``role`` (``target`` or ``draft``): ``given``, or the build's.

    Raises:
        UserError: it is missing, or its weight files are not those that the bundle was built from.
    """
    source = engine.record.sources[role]
    path = resolve_checkpoint(given) if given else Path(source.path)
    if not path.is_dir():
        try:
            path = resolve_checkpoint(source.checkpoint, source.revision)
        except (UserError, EnvironmentMissingError) as error:
            raise UserError(
                f"{source.path}: the {role} that {engine.path} was built from is missing; the "
                f"reference reads its weights. Name its folder: --{role} PATH"
            ) from error
    _check_files(engine, role, path)
    return path


def _check_files(engine: RecordingEngine, role: str, path: Path) -> None:
    """Compare files by content: the Hub's cache names files by blob.

    The token table beside TensorRT engines is no checkpoint file. The weights inside TensorRT
    engines are checked through their outputs.
    """
    there = {(file.stat().st_size, header_digest(file)) for file in path.glob("*.safetensors")}
    if not there:
        return  # converted on reading (pytorch_model.bin)
    made = {TABLE_FILE, *_made_locations(engine)}
    for location, expected in engine.record.sources[role].files.items():
        if location not in made and (expected.size, expected.header_sha256) not in there:
            raise UserError(
                f"{path}: not the {role} that {engine.path} was built from (size or header of "
                f"{Path(location).name} differs). Name the right folder, --{role} PATH, or rebuild "
                "the bundle."
            )


def _made_locations(engine: RecordingEngine) -> list[str]:
    """Return the file of weights that the build made from the checkpoint's, if any."""
    weights = engine.record.config.engine.weights
    return [made_location(weights)] if weights else []


def read_unquantised(
    engine: RecordingEngine,
    spec: TargetCheckpoint,
    target: str | None = None,
    original: str | None = None,
) -> TargetCheckpoint | None:
    """Return the 16-bit target of a quantised one; None if it is unknown.

    It is the checkpoint that the build quantised, or ``original``.

    Raises:
        UserError: ``original`` has another geometry or is quantised, or the target is not
            quantised.
    """
    if original is None:
        made = engine.record.config.engine.weights is not None
        return read_target(find_checkpoint(engine, "target", target)) if made else None
    found = read_target(resolve_checkpoint(original))
    if spec.quantisation is None or found.quantisation is not None:
        which = original if found.quantisation is not None else spec.path
        wanted = "a 16-bit" if found.quantisation is not None else "a quantised"
        raise UserError(
            f"validate --original: {which}: expected {wanted} target. --original names the "
            "checkpoint that the bundle's quantised target was made from."
        )
    if target_to_dict(found) != target_to_dict(spec):
        raise UserError(f"validate --original: {original}: geometry differs from {spec.path}")
    return found


def read_sources(
    engine: RecordingEngine, target: str | None = None, draft: str | None = None
) -> tuple[TargetCheckpoint, DraftManifest | None]:
    """Read spec and manifest again from the checkpoints, with the build's overrides.

    Weights that the build made are the bundle's own; ``weights.made`` compares them with the
    checkpoint's.
    """
    spec = read_target(find_checkpoint(engine, "target", target))
    built = engine.record.config.engine
    if built.weights:
        file = engine.path / made_location(built.weights)
        spec = made_target(spec, built.weights, file, head=built.quantise_head)
    config, manifest = engine.record.config.draft, engine.manifest
    if config is None or manifest is None:
        return spec, None
    kind = kind_of(manifest)
    path = spec.path if kind.in_target else find_checkpoint(engine, "draft", draft)
    return spec, read_draft(kind, path, spec, config.overrides)
