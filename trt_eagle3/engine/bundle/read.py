"""Read a bundle from disk: its allowed contents, its record, and the checks of every load."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trt_eagle3.atomic_io import PARTIAL, FolderKind, lock_file_of
from trt_eagle3.engine.bundle.check import GRAPHS, check_weights
from trt_eagle3.engine.bundle.record import BUNDLE_FILE, SCHEMA_VERSION, BundleRecord
from trt_eagle3.errors import UserError, clip, quote
from trt_eagle3.io.json_file import read_json_object
from trt_eagle3.io.validation import problem_text

__all__ = [
    "BUILD_SCRIPT",
    "BUNDLE_KIND",
    "BundleReplacedError",
    "check_name",
    "read_bundle",
    "retry_if_replaced",
    "unreplaced",
]

BUILD_SCRIPT = "build_engine.sh"
"""The script in a TensorRT bundle that builds engines later, where none could be built."""
_KEYS = {"schema_version", "tool_version", "config", "sources", "engine"}
_T = TypeVar("_T")
_ATTEMPTS = 8
_WAITS, _WAIT_S = 20, 0.01


class BundleReplacedError(UserError):
    """A build replaced the bundle while it was read, so parts of two bundles would be mixed."""


def _recognise(folder: Path) -> str:
    """Return why ``folder`` is no bundle, or an empty string. Any schema version is a bundle."""
    try:
        raw = read_json_object(folder / BUNDLE_FILE)
    except (OSError, UserError):
        return f"it has no readable {BUNDLE_FILE}"
    ours = raw.keys() >= _KEYS and isinstance(raw["schema_version"], int)
    return "" if ours else f"its {BUNDLE_FILE} is not one of trt-eagle3"


BUNDLE_KIND = FolderKind(
    "bundle",
    # written by: validate; bench --tune; trtexec in build_engine.sh; engines that compile at load
    additions=r"parity/((report|compare)\.(json|html))?"
    r"|tuning\.json"
    rf"|timing\.cache(\.lock)?|({'|'.join(GRAPHS)})/(rank0\.engine(\.partial)?|runtime\.cache)",
    recognise=_recognise,
)
"""The folder kind of bundles, with the files that commands other than ``build`` write there."""


def check_name(path: Path) -> None:
    """Refuse a bundle path that is not UTF-8: ONNX Runtime and the tokenizer could not open its
    files.

    Raises:
        UserError: the path is not UTF-8.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{clip(path)}: a bundle's path must be UTF-8. Name another place, or rename the "
            "folder."
        ) from error


def read_bundle(path: Path) -> BundleRecord:
    """Read and check the bundle at ``path``; start again if a build replaces it meanwhile.

    Raises:
        UserError: the path is no bundle, or an unfinished or damaged one, or one of another schema
            version; or its weights have changed, cannot be read, or lie outside the allowed places.
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
    """Check that the block read the bundle of ``record`` at ``path``, not a later one.

    Raises:
        BundleReplacedError: a build has replaced the bundle. It also replaces an error of the
            block, because the replacement caused that error.
    """
    try:
        yield
    except (UserError, OSError):
        _check_unreplaced(path, record)
        raise
    _check_unreplaced(path, record)


def retry_if_replaced(read: Callable[[], _T]) -> _T:
    """Return ``read()``; call it again if it raises ``BundleReplacedError``, up to a fixed number
    of attempts.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(BundleReplacedError):
            return read()
    return read()


def _check_unreplaced(path: Path, record: BundleRecord) -> None:
    with contextlib.suppress(UserError):
        if _read_record(path) == record:  # created_at differs between builds of one config
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
                "PAIR.yaml. Only serve, generate and LLM take a checkpoint, and probe a pair: "
                "trt-eagle3 probe TARGET DRAFT."
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
    """Yield every string in a JSON value, keys included."""
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
    """Return whether ``text`` has no lone surrogate. JSON can hold one; paths cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_raw(path: Path) -> dict[str, Any]:
    """Read the record. A build without an atomic exchange may be between its two renames, so a
    missing file is retried for a moment.
    """
    lock = lock_file_of(Path(os.path.realpath(path)))
    for _ in range(_WAITS):
        with contextlib.suppress(FileNotFoundError):
            return read_json_object(path / BUNDLE_FILE)
        if not lock.exists():
            break
        time.sleep(_WAIT_S)
    return read_json_object(path / BUNDLE_FILE)
