"""Deploy a bundle as a model in a Triton model repository, with launch files."""

from __future__ import annotations

import contextlib
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from trt_eagle3.atomic_io import (
    PARTIAL,
    FolderKind,
    atomic_directory,
    check_replaceable,
    create_file,
    make_parents,
    output_lock,
    place_file,
)
from trt_eagle3.engine.bundle.output_check import (
    check_apart,
    check_not_around,
    source_folders,
    weight_paths,
)
from trt_eagle3.engine.bundle.read import BUILD_SCRIPT, BUNDLE_KIND, read_bundle, unreplaced
from trt_eagle3.engine.bundle.record import BundleRecord
from trt_eagle3.engine.runtime.backend import Library
from trt_eagle3.errors import UserError
from trt_eagle3.io.template import render
from trt_eagle3.serving import ServingConfig
from trt_eagle3.triton.launchers import (
    BUNDLE_PLACE,
    PACKED,
    Model,
    check_launchers,
    check_together,
    container_notes,
    find_models,
    folder_bytes,
    start_command,
    write_launchers,
)
from trt_eagle3.triton.libraries import find_libraries
from trt_eagle3.triton.tensors import INPUTS, OUTPUTS

__all__ = ["DEFAULT_IMAGE", "ENVIRONMENTS", "Deployment", "deploy"]

DEFAULT_IMAGE = "nvcr.io/nvidia/tritonserver:26.07-py3"
ENVIRONMENTS = ("server", "interpreter")
"""Python environment of the model: the server's own, or this interpreter's.

A packed environment is given by its file name instead.
"""

_MODEL_KIND = FolderKind(
    "model",  # additions: compiled Python from loading in Triton, and additions to bundles
    additions=rf"1/__pycache__/([^/]+\.pyc)?|{BUNDLE_PLACE}/({BUNDLE_KIND.additions})",
    recognise=lambda folder: BUNDLE_KIND.recognise(folder / BUNDLE_PLACE),
)
# a file name has at most 255 bytes, and temporary names are longer than the final ones
_MAX_NAME = 128


@dataclass(frozen=True)
class Deployment:
    """The result of a deployment.

    Attributes:
        model: the model's folder. name: the name in requests. files: launch files in the
            repository.
        num_bytes: size of the bundle. placed: how its files were placed. notes: remarks for the
            user, one line each.
    """

    model: Path
    name: str
    files: tuple[Path, ...]
    num_bytes: int
    placed: tuple[str, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        paths = {
            "model": str(self.model),
            "name": self.name,
            "files": [str(file) for file in self.files],
        }
        return {
            **paths,
            "num_bytes": self.num_bytes,
            "placed": list(self.placed),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return lines for a terminal."""
        return [
            f"wrote {self.model}: {self.num_bytes / 1e6:.1f} MB by {' and '.join(self.placed)}",
            f"  beside it: {', '.join(file.name for file in self.files)}",
            *(f"note: {note}" for note in self.notes),
            f"next: {start_command(self.model.parent)}",
        ]


def deploy(
    bundle: Path,
    repository: Path,
    *,
    name: str | None = None,
    environment: str = "server",
    serving: Mapping[str, Any] | None = None,
    image: str = DEFAULT_IMAGE,
) -> Deployment:
    """Write the model ``name`` into ``repository``, all of it or nothing, and the launch files.

    The bundle's files are placed by reflink, hard link or copy, so the repository is
    self-contained.

    Args:
        name: of the model; the bundle's by default.
        environment: one of ``ENVIRONMENTS``, or a packed environment (.tar.gz of conda-pack or
            venv-pack).
        serving: fields of ``ServingConfig``.
        image: Triton image of the containers.
    Raises:
        UserError: no bundle, foreign files in the way, a bad field, or an existing model that needs
            another server.
    """
    record = read_bundle(bundle)
    name = name or record.config.name
    limits = ServingConfig.from_mapping(serving or {}, "--set")
    if not image or not image.isprintable() or " " in image:
        raise UserError(f"--image {image!r}: expected an image such as {DEFAULT_IMAGE}.")
    folder = repository / name
    _check_place(bundle, repository, folder, name, record)
    parameters = _parameters(limits, environment)
    model = Model(name, record, folder_bytes(bundle))
    libraries = find_libraries(record.config.engine)
    with _locked(repository):  # one deployment at a time, since all models share the launch files
        others, unread = find_models(repository, without=name)
        check_together(model, others)
        check_launchers(repository)
        placed = _write_model(folder, model, bundle, parameters, libraries, environment)
        models = (*others, model)
        files = write_launchers(repository, models, image)
    notes = [*_notes(environment), *_unbuilt(folder), *_lacking(libraries), *unread]
    notes += container_notes(repository, models)
    return Deployment(folder, name, files, model.num_bytes, placed, tuple(notes))


@contextlib.contextmanager
def _locked(repository: Path) -> Iterator[None]:
    lock = repository / "all models"  # not a valid model name
    try:
        make_parents(lock)
        with output_lock(lock, repository):
            yield
    except OSError as error:
        raise UserError(
            f"{repository}: cannot write there: {error.strerror or error}. Name another folder."
        ) from error


def _write_model(
    place: Path,
    model: Model,
    bundle: Path,
    parameters: Mapping[str, str],
    libraries: Sequence[Library],
    environment: str,
) -> tuple[str, ...]:
    """Write the model's folder; return how the bundle's files were placed."""
    values = {
        "version": version("trt-eagle3"),
        "bundle": model.record,
        "name": model.name,
        "parameters": parameters,
    }
    values |= {"inputs": INPUTS, "outputs": OUTPUTS}
    with atomic_directory(place, _MODEL_KIND) as folder:
        create_file(folder / "config.pbtxt", render("trt_eagle3.triton", "config.pbtxt", values))
        code = (folder / BUNDLE_PLACE).parent
        create_file(code / "model.py", render("trt_eagle3.triton", "model.py", values))
        with unreplaced(bundle, model.record):
            placed = _place(bundle, folder / BUNDLE_PLACE)
        for library in libraries:
            if library.path is not None:
                place_file(library.path, code / f"{library.variable}.so", link=False)
        if environment not in ENVIRONMENTS:
            place_file(Path(environment), folder / PACKED, link=False)
    return placed


def _unbuilt(model: Path) -> tuple[str, ...]:
    script = model / BUNDLE_PLACE / BUILD_SCRIPT
    if not script.is_file():
        return ()
    return (
        f"the engines are not built: before the server starts, run {script} on a machine with "
        "TensorRT and the GPU",
    )


def _check_place(
    bundle: Path, repository: Path, model: Path, name: str, record: BundleRecord
) -> None:
    if (
        not name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        or not name.isascii()
        or PARTIAL in name
    ):
        raise UserError(f"--name {name!r}: expected letters, digits, '.', '_' and '-'.")
    if len(name) > _MAX_NAME:
        raise UserError(
            f"--name: expected at most {_MAX_NAME} characters, got {len(name)}. Choose a shorter "
            "one."
        )
    inside, outside = repository.resolve(), bundle.resolve()
    if inside.is_relative_to(outside):
        raise UserError(f"{repository}: lies in the bundle. Name another folder.")
    if repository.exists() and not repository.is_dir():
        raise UserError(f"{repository}: not a folder. Name another one.")
    if outside.is_relative_to(model.resolve()):
        raise UserError(
            f"{bundle}: lies in the model that would be replaced. Name another repository."
        )
    check_apart(model, source_folders(record), "the checkpoint")
    check_not_around(model, weight_paths(bundle, record), "the weight file")
    check_replaceable(model, _MODEL_KIND)


def _parameters(serving: ServingConfig, environment: str) -> dict[str, str]:
    """Return the parameters of config.pbtxt; limits are YAML values."""
    found = {name: _yaml(value) for name, value in serving.model_dump(mode="json").items()}
    found["exit_on_crash"] = "true"
    if environment == "interpreter":
        if not Path(sys.prefix, "bin/activate").is_file():
            raise UserError(
                f"--env interpreter: {sys.prefix} is not a virtual environment. Run this from one, "
                "or use server."
            )
        found["EXECUTION_ENV_PATH"] = sys.prefix
    elif environment != "server":
        _check_packed(environment)
        found["EXECUTION_ENV_PATH"] = f"$$TRITON_MODEL_DIRECTORY/{PACKED}"
    return found


def _check_packed(file: str) -> None:
    try:
        tarfile.open(file, "r:gz").close()
    except (OSError, EOFError, tarfile.TarError) as error:
        expected = f"{', '.join(ENVIRONMENTS)}, or a packed environment's .tar.gz"
        raise UserError(
            f"--env {file}: expected {expected}: {error}. Make one with conda-pack."
        ) from error


def _yaml(value: Any) -> str:
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=1 << 30)
        .removesuffix("\n...\n")
        .strip()
    )
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _place(bundle: Path, destination: Path) -> tuple[str, ...]:
    sources = [file for file in sorted(bundle.rglob("*")) if file.is_file()]
    how = [place_file(file, destination / file.relative_to(bundle)) for file in sources]
    return tuple(dict.fromkeys(how))


def _lacking(libraries: Sequence[Library]) -> list[str]:
    return [
        f"{library.variable}: not built here, so the server must have it: {library.build}, then "
        "deploy again"
        for library in libraries
        if library.path is None
    ]


def _notes(environment: str) -> list[str]:
    if environment != "interpreter":
        return []
    return [f"the model runs in {sys.prefix} on this machine only: containers need --env server"]
