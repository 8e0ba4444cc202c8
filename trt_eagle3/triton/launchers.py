"""What stands beside the models of a repository and launches a server: for all of them,
whichever came last.
"""

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
"""Of a model's bundle in its folder, below Triton's version of the model."""
PACKED = "env.tar.gz"
"""A model's packed environment, in its folder."""
_MARK = "Written by trt-eagle3"
_FILES = {"launch.sh": "launch.sh", "compose.yaml": "compose.yaml", "Dockerfile": "Dockerfile"}
_FILES |= {"kubernetes.yaml": "kubernetes.yaml", ".dockerignore": "dockerignore"}


@dataclass(frozen=True)
class Model:
    """A model of a repository; ``num_bytes``: of its bundle."""

    name: str
    record: BundleRecord
    num_bytes: int


def find_models(repository: Path, without: str) -> tuple[list[Model], list[str]]:
    """The models of ours in ``repository`` but one, and a note on each that cannot be read."""
    models, notes = [], []
    for file in sorted(repository.glob(f"*/{BUNDLE_PLACE}/{BUNDLE_FILE}")):
        name = file.relative_to(repository).parts[0]
        if name == without or PARTIAL in name:
            continue
        try:
            models.append(Model(name, read_bundle(file.parent), folder_bytes(file.parent)))
        except UserError as error:
            notes.append(f"{name}: not counted in what lies beside it: {error}")
    return models, notes


def folder_bytes(folder: Path) -> int:
    """Of all its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _gibibytes(num_bytes: int) -> int:
    """With room to spare."""
    return max(1, -(-num_bytes * 12 // 10 >> 30))


def check_together(model: Model, others: Sequence[Model]) -> None:
    """Refuse ``model`` where no one server could run it beside ``others``.

    Raises:
        UserError: engines of different versions of a runtime, or for different GPUs.
    """
    for other in others:
        ours, theirs = _exact_needs(model.record), _exact_needs(other.record)
        for what, mine in ours.items():
            if mine != (its := theirs.get(what, mine)):
                raise UserError(
                    f"{model.name}: built for {what} {mine}, but {other.name} for {its}, and one "
                    "server has one. Name another --repository, or build them alike."
                )


def _exact_needs(record: BundleRecord) -> dict[str, str]:
    """What a server must have in this very version, and has once."""
    engine = record.engine
    exact = {name: label for b in all_backends() for name, label in b.exact_packages.items()}
    needs = {exact[name]: found for name, found in engine.versions.items() if name in exact}
    return needs | ({"GPU architecture": engine.gpu_arch} if engine.gpu_arch else {})


def check_launchers(repository: Path) -> None:
    """Refuse to replace files that are not ours.

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
    """Write the files for ``models``, the last of which has been deployed now; returns those
    that there are.
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
        # without +cpu, which is on no index
        "pins": [f"{package}=={pin}" for package, pin in pins.items()],
        "mounts": sorted({folder for model in models for folder in _mounts(model.record)}),
        "slug": _slug(repository, models[-1].name),
        "storage": _gibibytes(folder_bytes(repository)),  # packed environments and all
        "memory": sum(_gibibytes(model.num_bytes) * 2 + 4 for model in models),
    }


def _sharing(repository: Path, models: Sequence[Model]) -> list[Model]:
    """Those that run in the image's environment, not in one of their own."""
    return [model for model in models if not (repository / model.name / PACKED).exists()]


def _versions(model: Model) -> dict[str, str]:
    """Of the packages that run it."""
    return {
        package: found
        for package, found in model.record.engine.versions.items()
        if package != "onnx"
    }


def _image(repository: Path, models: Sequence[Model]) -> dict[str, tuple[str, str]]:
    """The versions in the image, each with the last model that was built with the package: its
    is taken.
    """
    sharing = _sharing(repository, models)
    return {
        package: (found, model.name)
        for model in sharing
        for package, found in _versions(model).items()
    }


def _slug(repository: Path, name: str) -> str:
    """What containers are called: a name that they have already, so that another model does not
    start them twice.
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
    """Folders outside the bundle that hold its weights."""
    files = [file for source in record.sources.values() for file in source.files]
    return (
        {str((REFERENCE_ROOT / file).parent) for file in files}
        if record.weights == "reference"
        else set()
    )


def _referring(models: Sequence[Model]) -> list[str]:
    return [model.name for model in models if model.record.weights == "reference"]


def container_notes(repository: Path, models: Sequence[Model]) -> list[str]:
    """What containers lack."""
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
            "the Dockerfile installs a wheel that must lie beside it: "
            f"pip wheel --no-deps -w {shlex.quote(str(repository))} {source}"
        )
    return notes


def _unlike(repository: Path, models: Sequence[Model]) -> list[str]:
    """What the image has in other versions than models were built with."""
    image = _image(repository, models)
    return [
        f"{model.name}: built with {package} {theirs}, but the image has {found}, of {last}: "
        "build them alike, or give each an environment of its own (--env)"
        for model in _sharing(repository, models)
        for package, theirs in sorted(_versions(model).items())
        for found, last in [image[package]]
        if theirs != found
    ]


def start_command(repository: Path) -> str:
    """What starts the server; in a checkout, with the environment that its Makefile makes where
    there is no server.
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
    """The folder of trt-eagle3's sources, where it runs from them."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "Makefile").is_file() else None
