"""Build a checkpoint into a cache folder on the way, and reuse the bundle while nothing changed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trt_eagle3.backend_support import SUPPORT
from trt_eagle3.checkpoint.source import is_hub_id, resolve_checkpoint
from trt_eagle3.config import BuildConfig, config_from_dict, merged
from trt_eagle3.engine.bundle.record import BUNDLE_FILE, SCHEMA_VERSION
from trt_eagle3.engine.kernels.libraries import INSTALL_KERNELS, cache_root
from trt_eagle3.errors import EnvironmentMissingError, UserError, clip

__all__ = ["bundle_of", "default_engine", "is_checkpoint"]

_READ = {".json", ".safetensors", ".jinja", ".txt", ".bin"}
"""Suffixes of the files of a checkpoint that a build or a load may read."""
_CPU = {"backend": "onnxruntime"}
_GPU = {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}


def is_checkpoint(target: str | Path) -> bool:
    """Return whether ``target`` is a checkpoint: a folder with config.json, or a Hub id.

    ``owner/name`` is a path, not a Hub id, if the folder ``owner`` exists.
    """
    path = Path(target).expanduser()
    if (path / BUNDLE_FILE).exists():
        return False
    if (path / "config.json").is_file():
        return True
    name = str(target)
    return is_hub_id(name) and not path.exists() and not Path(name).parent.exists()


def bundle_of(
    target: str | Path,
    draft: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    cache: str | Path | None = None,
    announce: Callable[[str], object] = str,
    origin: str = "settings",
) -> Path:
    """Return the bundle of ``target``: itself, or one that is built from a checkpoint.

    The cache keeps a bundle per config, files of the checkpoints (sizes and times) and version of
    this package. Its weights stay in the checkpoints, unless the build makes new ones.

    Args:
        target: a bundle, or a checkpoint: a folder or a Hub id.
        draft: the draft's checkpoint, or ``mtp``; only with a checkpoint.
        settings: keys of the build config, in sections; only with a checkpoint.
        cache: folder of the built bundles. None: ``bundles`` in ``TRT_EAGLE3_CACHE``, else in
            ``trt-eagle3`` of the user's cache folder.
        announce: called with what is done.
        origin: what messages call ``settings``.
    Raises:
        UserError: an error in the checkpoints or settings, or ``draft`` or ``settings`` given with
            a bundle.
        EnvironmentMissingError: a GPU without compiled kernels, and no backend in ``settings``.
    """
    if not is_checkpoint(target):
        _check_alone(target, draft, settings, origin)
        return Path(target)
    config = _config(target, draft, settings or {}, origin)
    root = Path(cache).expanduser().absolute() if cache else cache_root() / "bundles"
    folder = root / _key(config)
    path = folder / config.name
    with _alone(folder, announce):
        if _is_sound(path):
            announce(f"reused {path}: built before from {target}; nothing changed since")
        else:
            _build(config, folder, announce)
    return path


def default_engine() -> Mapping[str, str]:
    """Return the ``engine`` section of a config that names no backend.

    torch on CUDA in bfloat16 with a GPU and our kernels, onnxruntime on a CPU.

    Raises:
        EnvironmentMissingError: there is a GPU, but the kernels are not compiled.
    """
    import torch

    if not torch.cuda.is_available():
        return _CPU
    from trt_eagle3.engine import capi

    if not capi.available():
        raise EnvironmentMissingError(
            f"{torch.cuda.get_device_name()}: the CUDA kernels are not compiled for it. Run once: "
            f"{INSTALL_KERNELS}. To use the CPU instead: --set engine.backend=onnxruntime"
        )
    return _GPU


def _check_alone(
    bundle: str | Path, draft: str | Path | None, settings: Mapping[str, Any] | None, origin: str
) -> None:
    """Refuse a draft or build settings for a bundle."""
    if not (draft or settings) or not (Path(bundle) / BUNDLE_FILE).exists():
        return
    what = f"draft {draft}" if draft else f"{origin} {clip(_first_key(settings or {}))}"
    raise UserError(
        f"{what}: set at build, but {bundle} is a bundle, which is built already. Leave it out, or "
        "name the target's checkpoint instead of the bundle."
    )


def _first_key(settings: Mapping[str, Any]) -> str:
    """Return the first key of ``settings`` with its sections: ``limits.max_seq_len``."""
    name, value = next(iter(settings.items()))
    return f"{name}.{_first_key(value)}" if value and isinstance(value, Mapping) else str(name)


def _config(
    target: str | Path, draft: str | Path | None, settings: Mapping[str, Any], origin: str
) -> BuildConfig:
    """Return the build config: defaults of this machine, then ``settings``."""
    raw: dict[str, Any] = {"name": _name(target), "target": {"checkpoint": _absolute(target)}}
    if draft is not None:
        raw["draft"] = {"checkpoint": str(draft) if str(draft) == "mtp" else _absolute(draft)}
    raw = merged(raw, settings)
    engine = raw.get("engine", {})
    if isinstance(engine, Mapping) and "backend" not in engine:
        raw["engine"] = {**(_CPU if engine.get("device") == "cpu" else default_engine()), **engine}
    limits = raw.get("limits", {})
    origin = origin if settings else str(target)
    config = config_from_dict(raw, origin)
    if isinstance(limits, Mapping) and "max_seq_len" not in limits:
        raw["limits"] = {**limits, "max_seq_len": _length(config)}
        config = config_from_dict(raw, origin)
    return config


def _name(target: str | Path) -> str:
    """Return a bundle's name from the last part of a checkpoint's path or Hub id."""
    last = Path(target).expanduser().absolute().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-") or "bundle"


def _absolute(checkpoint: str | Path) -> str:
    """Return a folder's absolute path; a Hub id as it is."""
    path = Path(checkpoint).expanduser()
    return str(path.absolute()) if path.exists() else str(checkpoint)


def _length(config: BuildConfig) -> int:
    """Return the default ``max_seq_len``, within the target's trained positions."""
    from trt_eagle3.families.registry import read_target

    spec = read_target(resolve_checkpoint(config.target.checkpoint, config.target.revision))
    return min(config.limits.max_seq_len, spec.max_position_embeddings)


def _key(config: BuildConfig) -> str:
    """Return a digest of everything that the bundle depends on."""
    from trt_eagle3.engine.runtime.backend import backend_named

    parts: dict[str, Any] = {
        "tool": [version("trt-eagle3"), SCHEMA_VERSION],
        "config": config.model_dump(mode="json"),
        "target": _files(config.target.checkpoint, config.target.revision),
    }
    if config.draft and config.draft.checkpoint != "mtp":
        try:
            parts["draft"] = _files(config.draft.checkpoint, config.draft.revision)
        except (UserError, EnvironmentMissingError) as error:
            raise type(error)(f"draft: {error}") from error
    if config.prompts:
        parts["prompts"] = _stamp(config.prompts)
    exact = backend_named(config.engine.backend).exact_packages
    if exact:  # engines run on one GPU architecture, with one version of each package
        from trt_eagle3.engine.runtime.machine import gpu_arch

        parts["machine"] = [gpu_arch(), *(_version(name) for name in exact)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _files(checkpoint: str, revision: str | None) -> list[Any]:
    """Return name, size and time of each file of a checkpoint that counts."""
    folder = resolve_checkpoint(checkpoint, revision)
    files = sorted(f for f in folder.iterdir() if f.suffix in _READ and f.is_file())
    return [str(folder.absolute()), *([f.name, *_stamp(f)] for f in files)]


def _stamp(file: Path) -> list[int]:
    try:
        facts = file.stat()
    except OSError:  # the build names what is missing
        return []
    return [facts.st_size, facts.st_mtime_ns]


def _version(package: str) -> str | None:
    with contextlib.suppress(ImportError):
        return version(package)
    return None


@contextlib.contextmanager
def _alone(folder: Path, announce: Callable[[str], object]) -> Iterator[None]:
    """Hold the lock of a cached bundle. A second process waits, and then reuses the bundle."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"{clip(folder)}: cannot write the cache: {error.strerror}. Name another: --cache "
            "FOLDER, or TRT_EAGLE3_CACHE."
        ) from error
    try:
        with contextlib.suppress(OSError):  # file systems without locks do not separate builds
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                announce(f"waiting for another process, which builds {folder}")
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_sound(path: Path) -> bool:
    """Return whether a bundle is there and its weights are unchanged."""
    from trt_eagle3.engine.bundle.read import read_bundle

    try:
        read_bundle(path)
    except UserError:
        return False
    return True


def _build(config: BuildConfig, output: Path, announce: Callable[[str], object]) -> None:
    from trt_eagle3.pipeline import build

    engine, draft = config.engine, config.draft
    spoken = f"draft {draft.checkpoint}" if draft else "without a draft"
    announce(
        f"building {config.target.checkpoint}, {spoken}: {engine.backend} on {engine.device}, "
        f"{engine.dtype}, sequences of {config.limits.max_seq_len} tokens at most"
    )
    begin = time.perf_counter()
    report = build(
        config,
        output=output,
        reference_weights=not SUPPORT[engine.backend].compiles and engine.weights is None,
    )
    announce(f"built into {report.path} in {time.perf_counter() - begin:.1f} s")
    for warning in report.warnings:
        announce(f"warning: {warning}")
