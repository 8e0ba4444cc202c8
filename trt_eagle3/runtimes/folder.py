"""Share what all runtime folders need: path checks and the target's location."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.atomic_io import FolderKind, check_replaceable
from trt_eagle3.engine.bundle.output_check import (
    check_apart,
    check_not_around,
    source_folders,
    weight_paths,
)
from trt_eagle3.engine.bundle.record import BundleRecord, SourceRecord
from trt_eagle3.errors import UserError
from trt_eagle3.spec import TargetSpec

__all__ = ["RuntimeFolder", "check_heads", "check_place", "target_source"]


@dataclass(frozen=True)
class RuntimeFolder:
    """A written folder with its runtime and version.

    Attributes:
        notes: remarks for the user, one line each.
    """

    path: Path
    runtime: str
    version: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "path": str(self.path),
            "runtime": self.runtime,
            "version": self.version,
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return lines for a terminal."""
        notes = [f"note: {note}" for note in self.notes]
        return [
            f"wrote {self.path} for {self.runtime} {self.version}",
            *notes,
            f"next: {shlex.quote(str(self.path / 'serve.sh'))}",
        ]


def check_place(bundle: Path, repository: Path, record: BundleRecord, kind: FolderKind) -> None:
    """Refuse a folder that overlaps with the bundle or its sources, or that has other files.

    Raises:
        UserError: any of these.
    """
    whole, part = bundle.resolve(), repository.resolve()
    if whole.is_relative_to(part) or part.is_relative_to(whole):
        raise UserError(f"{repository}: overlaps with the bundle. Name another folder.")
    check_apart(repository, source_folders(record), "the checkpoint")
    check_not_around(repository, weight_paths(bundle, record), "the weight file")
    check_replaceable(repository, kind)


def check_heads(spec: TargetSpec, size: int) -> None:
    """Refuse a tensor-parallel size that does not divide the attention heads.

    Raises:
        UserError: the size is below 1 or does not divide them.
    """
    heads = spec.attention.num_heads
    if size < 1 or heads % size:
        raise UserError(
            f"--tensor-parallel-size {size}: expected a divisor of the target's {heads} attention "
            "heads."
        )


def target_source(source: SourceRecord) -> str:
    """Return the checkpoint's folder, or its Hub id if the folder is gone."""
    return str(Path(source.path).absolute()) if Path(source.path).is_dir() else source.checkpoint
