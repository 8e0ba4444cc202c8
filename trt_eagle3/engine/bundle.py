"""A bundle on disk: what it may hold, and reading its record with the checks of every load."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trt_eagle3.atomic_io import PARTIAL, FolderKind, lock_file_of
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.engine.bundle_check import check_graphs, check_tables, check_weights, header_digest
from trt_eagle3.engine.bundle_record import (
    BUNDLE_FILE,
    REFERENCE_ROOT,
    SCHEMA_VERSION,
    BundleRecord,
    EngineRecord,
    FileRecord,
    SourceRecord,
    TensorRecord,
)
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.json_file import read_json_object
from trt_eagle3.io.validation import problem_text

__all__ = [
    "BUILD_SCRIPT",
    "BUNDLE_FILE",
    "BUNDLE_KIND",
    "REFERENCE_ROOT",
    "SCHEMA_VERSION",
    "BundleRecord",
    "BundleReplacedError",
    "EngineRecord",
    "FileRecord",
    "SourceRecord",
    "TensorRecord",
    "check_graphs",
    "check_name",
    "check_tables",
    "header_digest",
    "read_bundle",
    "reference_location",
    "retry_if_replaced",
    "unreplaced",
]

BUILD_SCRIPT = "build_engine.sh"
"""What a TensorRT bundle has in place of engines where none could be built."""
_KEYS = {"schema_version", "tool_version", "config", "sources", "engine"}
_T = TypeVar("_T")
_ATTEMPTS = 8
_WAITS, _WAIT_S = 20, 0.01


class BundleReplacedError(UserError):
    """A build replaced the bundle while it was read: parts of two bundles would have been mixed."""


def _recognise(folder: Path) -> str:
    """Return why ``folder`` is no bundle, or nothing; one of another schema version is one."""
    try:
        raw = read_json_object(folder / BUNDLE_FILE)
    except (OSError, UserError):
        return f"it has no readable {BUNDLE_FILE}"
    ours = raw.keys() >= _KEYS and isinstance(raw["schema_version"], int)
    return "" if ours else f"its {BUNDLE_FILE} is not one of trt-eagle3"


BUNDLE_KIND = FolderKind(
    "bundle",
    # validate; bench --tune; build_engine.sh with what trtexec keeps; engines that compile at load
    additions=r"parity/((report|compare)\.(json|html))?"
    r"|tuning\.json"
    r"|timing\.cache(\.lock)?|(target|vision|fuse|draft)/rank0\.engine(\.partial)?"
    r"|(target|vision|fuse|draft)/runtime\.cache",
    recognise=_recognise,
)
"""Bundles, with what commands other than ``build`` write into them."""


def reference_location(ref: TensorRef) -> str:
    """Location of a tensor's own file under ``REFERENCE_ROOT``; links are followed, because
    sessions refuse them.
    """
    return str(ref.file.resolve().relative_to(REFERENCE_ROOT))


def check_name(path: Path) -> None:
    """Refuse a bundle's place whose name is not UTF-8: neither ONNX Runtime nor the tokenizer could
    open its files.

    Raises:
        UserError: it is not.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{clip(path)}: a bundle's path must be UTF-8. Name another place, or rename the "
            "folder."
        ) from error


def read_bundle(path: Path) -> BundleRecord:
    """Read and check the bundle at ``path``; again where a build replaces it meanwhile.

    Raises:
        UserError: not a bundle, an unfinished or damaged one, of another schema version, or its
            weights have changed or cannot be read, or are not where a bundle's may be.
    """
    check_name(path)

    def read() -> BundleRecord:
        record = _read_record(path)
        with unreplaced(path, record):
            check_weights(path, record)
        return record

    return retry_if_replaced(read)


@contextlib.contextmanager
def unreplaced(path: Path, record: BundleRecord) -> Iterator[None]:
    """Refuse what the block read from ``path`` where that is no longer the bundle of ``record``.

    Raises:
        BundleReplacedError: a build has replaced it; also in place of what the block raised, which
            came of that.
    """
    try:
        yield
    except (UserError, OSError):
        _check_unreplaced(path, record)
        raise
    _check_unreplaced(path, record)


def retry_if_replaced(read: Callable[[], _T]) -> _T:
    """Return ``read()``, called again where it raises ``BundleReplacedError``; a few times at
    most.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(BundleReplacedError):
            return read()
    return read()


def _check_unreplaced(path: Path, record: BundleRecord) -> None:
    with contextlib.suppress(UserError):
        if _read_record(path) == record:  # created_at tells builds of one config apart
            return
    raise BundleReplacedError(
        f"{path}: was replaced or removed after it was opened. Load it again."
    )


def _read_record(path: Path) -> BundleRecord:
    if PARTIAL in path.name:
        raise UserError(f"{path}: an unfinished build, not a bundle. Run trt-eagle3 build again.")
    file = path / BUNDLE_FILE
    try:
        raw = _read_raw(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (path / "config.json").is_file():
            raise UserError(
                f"{path}: a checkpoint, expected a bundle. Build one from it: trt-eagle3 build "
                "PAIR.yaml. Only serve, generate and LLM take a checkpoint."
            ) from error
        raise UserError(
            f"{path}: no bundle here ({BUNDLE_FILE} not found). Make one: trt-eagle3 build"
        ) from error
    except OSError as error:
        raise UserError(
            f"{file}: unreadable: {error.strerror}. Rebuild: trt-eagle3 build"
        ) from error
    except UserError as error:
        raise UserError(f"{error} Rebuild: trt-eagle3 build") from error
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{file}: bundle schema version {quote(version)}, this trt-eagle3 reads "
            f"{SCHEMA_VERSION}. Rebuild: trt-eagle3 build --config <its config>"
        )
    for text in _texts(raw):
        if not _is_unicode(text):
            raise UserError(
                f"{file}: expected Unicode texts, got {quote(text)}. Rebuild: trt-eagle3 build"
            )
    try:
        return BundleRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = clip(".".join(str(p) for p in first["loc"]))
        raise UserError(
            f"{file}: {where}: {clip(problem_text(first))}. Rebuild: trt-eagle3 build"
        ) from error


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_unicode(text: str) -> bool:
    """Whether ``text`` has no lone surrogate. JSON can hold one; paths and messages cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_raw(path: Path) -> dict[str, Any]:
    """The record; waits a moment where a build without an atomic exchange may be between its two
    renames.
    """
    lock = lock_file_of(Path(os.path.realpath(path)))
    for _ in range(_WAITS):
        with contextlib.suppress(FileNotFoundError):
            return read_json_object(path / BUNDLE_FILE)
        if not lock.exists():
            break
        time.sleep(_WAIT_S)
    return read_json_object(path / BUNDLE_FILE)
