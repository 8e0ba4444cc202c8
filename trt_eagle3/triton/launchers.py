"""Write the files beside a repository's models that launch one server for all of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trt_eagle3.atomic_io import PARTIAL, write_file
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.engine.bundle.record import BUNDLE_FILE, REFERENCE_ROOT, BundleRecord
from trt_eagle3.engine.runtime.backend import all_backends
from trt_eagle3.errors import UserError
from trt_eagle3.io.template import render

__all__ = [
    "BUNDLE_PLACE",
    "PACKED",
    "Model",
    "check_launchers",
    "check_together",
    "container_notes",
    "find_models",
    "folder_bytes",
    "start_command",
    "write_launchers",
]

BUNDLE_PLACE = "1/bundle"
"""Path of the bundle in a model's folder, below Triton's version of the model."""
PACKED = "env.tar.gz"
"""A model's packed environment, in its folder."""
_MARK = "Written by trt-eagle3"
_FILES = {"launch.sh": "launch.sh", "compose.yaml": "compose.yaml", "Dockerfile": "Dockerfile"}
_FILES |= {"kubernetes.yaml": "kubernetes.yaml", ".dockerignore": "dockerignore"}


@dataclass(frozen=True)
class Model:
    """A model of a repository; ``num_bytes``: size of its bundle."""

    name: str
    record: BundleRecord
    num_bytes: int


def find_models(repository: Path, without: str) -> tuple[list[Model], list[str]]:
    """Find our models in ``repository`` except one, and note each that cannot be read."""
    models, notes = [], []
    for file in sorted(repository.glob(f"*/{BUNDLE_PLACE}/{BUNDLE_FILE}")):
        name = file.relative_to(repository).parts[0]
        if name == without or PARTIAL in name:
            continue
        try:
            models.append(Model(name, read_bundle(file.parent), folder_bytes(file.parent)))
        except UserError as error:
            notes.append(f"{name}: left out of the launch files: {error}")
    return models, notes


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in ``folder``."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _gibibytes(num_bytes: int) -> int:
    """Convert to GiB with 20 % to spare, rounded up, at least 1."""
    return max(1, -(-num_bytes * 12 // 10 >> 30))


def check_together(model: Model, others: Sequence[Model]) -> None:
    """Refuse ``model`` if no single server can run it beside ``others``.

    Raises:
        UserError: engines of different versions of a runtime, or for different GPUs.
    """
    for other in others:
        ours, theirs = _exact_needs(model.record), _exact_needs(other.record)
        for what, mine in ours.items():
            if mine != (its := theirs.get(what, mine)):
                raise UserError(
                    f"{model.name}: built for {what} {mine}, but {other.name} for {its}, and a "
                    "server has only one. Name another --repository, or build both alike."
                )


def _exact_needs(record: BundleRecord) -> dict[str, str]:
    """Return the requirements that must match exactly and that a server has only once."""
    engine = record.engine
    exact = {name: label for b in all_backends() for name, label in b.exact_packages.items()}
    needs = {exact[name]: found for name, found in engine.versions.items() if name in exact}
    return needs | ({"GPU architecture": engine.gpu_arch} if engine.gpu_arch else {})


def check_launchers(repository: Path) -> None:
    """Refuse to replace launch files that trt-eagle3 did not write.

    Raises:
        UserError: there is one.
    """
    for file in (repository / name for name in _FILES):
        if file.exists() and (not file.is_file() or _MARK.encode() not in file.read_bytes()[:400]):
            raise UserError(
                f"{file}: not written by trt-eagle3, so it is not replaced. Move it, or name "
                "another repository."
            )


def write_launchers(repository: Path, models: Sequence[Model], image: str) -> tuple[Path, ...]:
    """Write the launch files for ``models``, and return their paths.

    The last model is the one deployed now.
    """
    values = _values(repository, models, image)
    written = []
    for name, template in _FILES.items():
        if name == "kubernetes.yaml" and _referring(models):
            (repository / name).unlink(missing_ok=True)
            continue
        mode = 0o777 if name == "launch.sh" else 0o666
        write_file(repository / name, render("trt_eagle3.triton", template, values), mode)
        written.append(repository / name)
    return tuple(written)


def _values(repository: Path, models: Sequence[Model], image: str) -> dict[str, Any]:
    pins = {
        package: found.partition("+")[0]
        for package, (found, _) in _image(repository, models).items()
    }
    return {
        "version": version("trt-eagle3"),
        "environment": sys.prefix,
        "image": image,
        "gpu": any(model.record.config.engine.device == "cuda" for model in models),
        # without +cpu, which no package index has
        "pins": [f"{package}=={pin}" for package, pin in pins.items()],
        "mounts": sorted({folder for model in models for folder in _mounts(model.record)}),
        "slug": _slug(repository, models[-1].name),
        "storage": _gibibytes(folder_bytes(repository)),  # including packed environments
        "memory": sum(_gibibytes(model.num_bytes) * 2 + 4 for model in models),
    }


def _sharing(repository: Path, models: Sequence[Model]) -> list[Model]:
    """Return the models that run in the image's environment, without one of their own."""
    return [model for model in models if not (repository / model.name / PACKED).exists()]


def _versions(model: Model) -> dict[str, str]:
    """Return the versions of the packages that run the model."""
    return {
        package: found
        for package, found in model.record.engine.versions.items()
        if package != "onnx"
    }


def _image(repository: Path, models: Sequence[Model]) -> dict[str, tuple[str, str]]:
    """Return each package's version in the image, with the model that determines it.

    That is the last model built with the package.
    """
    sharing = _sharing(repository, models)
    return {
        package: (found, model.name)
        for model in sharing
        for package, found in _versions(model).items()
    }


def _slug(repository: Path, name: str) -> str:
    """Return the project name of the containers: an existing one, else one made from ``name``.

    Keeping it prevents a second model from starting the containers twice.
    """
    file = repository / "compose.yaml"
    if file.exists() and (
        found := re.search(r"^name: (\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    ):
        return found[1]
    return "-".join(
        part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part
    )


def _mounts(record: BundleRecord) -> set[str]:
    """Return the folders outside the bundle that hold its weights."""
    files = [file for source in record.sources.values() for file in source.files]
    return (
        {str((REFERENCE_ROOT / file).parent) for file in files}
        if record.weights == "reference"
        else set()
    )


def _referring(models: Sequence[Model]) -> list[str]:
    return [model.name for model in models if model.record.weights == "reference"]


def container_notes(repository: Path, models: Sequence[Model]) -> list[str]:
    """Return notes on what the containers lack."""
    notes = []
    if names := _referring(models):
        notes.append(
            f"{', '.join(names)}: refers to its checkpoints, so there is no kubernetes.yaml: "
            "build it with --weights contained"
        )
    notes += _unlike(repository, models)
    if not any(repository.glob(f"trt_eagle3-{version('trt-eagle3')}-*.whl")):
        source = shlex.quote(str(_checkout() or "/path/to/trt-eagle3"))
        notes.append(
            "the Dockerfile installs a wheel that must be beside it: "
            f"pip wheel --no-deps -w {shlex.quote(str(repository))} {source}"
        )
    return notes


def _unlike(repository: Path, models: Sequence[Model]) -> list[str]:
    """Return notes on packages whose version in the image differs from a model's build."""
    image = _image(repository, models)
    return [
        f"{model.name}: built with {package} {theirs}, but the image has {found}, of {last}: "
        "build them alike, or give each its own environment (--env)"
        for model in _sharing(repository, models)
        for package, theirs in sorted(_versions(model).items())
        for found, last in [image[package]]
        if theirs != found
    ]


def start_command(repository: Path) -> str:
    """Return the command that starts the server.

    In a checkout without a server, it first makes the Makefile's Triton environment.
    """
    script, checkout = shlex.quote(str(repository / "launch.sh")), _checkout()
    if (
        shutil.which(os.environ.get("TRITONSERVER", "tritonserver"))
        or find_spec("pytriton")
        or not checkout
    ):
        return script
    place = shlex.quote(str(checkout))
    return f"make -C {place} .venv-triton/.ready && TRT_EAGLE3_ENV={place}/.venv-triton {script}"


def _checkout() -> Path | None:
    """Return the source folder of trt-eagle3 if it runs from one, else None."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "Makefile").is_file() else None
