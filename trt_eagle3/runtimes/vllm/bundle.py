"""Deploy a bundle as input of vLLM: the draft in its layout, its options, its launch files.

Sources of option names and of what its loaders read: vLLM 0.25.1, ``vllm/engine/arg_utils.py``,
``vllm/utils/argparse_utils.py`` (configuration files),
``vllm/transformers_utils/configs/speculators`` and ``vllm/model_executor/models/llama_eagle3.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import yaml

from trt_eagle3.atomic_io import FolderKind, atomic_directory, create_file
from trt_eagle3.checkpoint.convert import Layout
from trt_eagle3.checkpoint.manifest import AutoregressiveManifest, DraftManifest
from trt_eagle3.config import BuildConfig, EngineConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import family_of
from trt_eagle3.io.template import render
from trt_eagle3.runtimes.folder import (
    RuntimeFolder,
    check_heads,
    check_place,
    target_source,
)
from trt_eagle3.spec import TargetSpec

__all__ = ["VERSION", "deploy", "serve_config"]

VERSION = "0.25.1"
_KIND = FolderKind("folder for vLLM")
_LAYOUT: Layout = "speculators"  # the layout of vLLM's own project: it has a key for every norm
_TEMPLATES = {
    "serve.sh": 0o777,
    "README.md": 0o666,
    "compose.yaml": 0o666,
    "kubernetes.yaml": 0o666,
}


def deploy(
    bundle: Path,
    repository: Path,
    *,
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
) -> RuntimeFolder:
    """Write ``repository``, whole or not at all.

    It has the normalised draft, the options of ``vllm serve``, a launch script, and files for
    Docker Compose and Kubernetes.

    Args:
        tensor_parallel_size: GPUs that share one copy of the target.
        data_parallel_size: copies of the target, each on its own GPUs.
    Raises:
        UserError: a draft that vLLM cannot express, a size that does not divide the heads, no copy,
            a folder with other files.
    """
    loaded = LoadedBundle.open(bundle)
    spec, manifest, config = loaded.spec, loaded.manifest, loaded.record.config
    check_heads(spec, tensor_parallel_size)
    if data_parallel_size < 1:
        raise UserError(f"--data-parallel-size {data_parallel_size}: expected 1 or more.")
    check_place(bundle, repository, loaded.record, _KIND)
    options = serve_config(
        config, manifest, tensor_parallel_size=tensor_parallel_size, copies=data_parallel_size
    )
    notes = tuple(_differences(manifest, spec, config.engine, config.speculation.mode))
    values = _values(config.name, target_source(loaded.record.sources["target"]), options) | {
        "draft": manifest is not None and not kind_of(manifest).in_target,
        "gpus": tensor_parallel_size * data_parallel_size,
        "notes": notes,
    }
    with atomic_directory(repository, _KIND) as folder:
        if manifest and not kind_of(manifest).in_target:
            architecture = family_of(spec).architecture
            kind_of(manifest).export(manifest, folder / "draft", _LAYOUT, architecture)
        create_file(folder / "config.yaml", _yaml(options))
        for name, mode in _TEMPLATES.items():
            create_file(folder / name, render("trt_eagle3.runtimes.vllm", name, values), mode)
    return RuntimeFolder(repository, "vLLM", VERSION, notes)


def serve_config(
    config: BuildConfig,
    manifest: DraftManifest | None,
    *,
    tensor_parallel_size: int = 1,
    copies: int = 1,
) -> dict[str, Any]:
    """Return the options of ``vllm serve`` except the target.

    A draft with its own files is in the folder ``draft``, beside the options.
    """
    options: dict[str, Any] = {
        "served-model-name": config.name,
        "dtype": config.engine.dtype,
        "max-model-len": config.limits.max_seq_len,
        "max-num-seqs": config.limits.max_batch_size,
        "gpu-memory-utilization": config.limits.memory_fraction,
        "tensor-parallel-size": tensor_parallel_size,
        "data-parallel-size": copies,
    }
    if not config.limits.prefix_cache:
        options["no-enable-prefix-caching"] = True
    if manifest is not None:
        kind = kind_of(manifest)
        options["speculative-config"] = {
            **kind.vllm_options(manifest),
            **({} if kind.in_target else {"model": "draft"}),
            "num_speculative_tokens": config.speculation.steps,
        }
    return options


def _differences(
    manifest: DraftManifest | None, spec: TargetSpec, engine: EngineConfig, mode: str
) -> Iterator[str]:
    """Yield notes where vLLM's interpretation of a draft differs from the manifest's."""
    if manifest is None:
        return
    yield from kind_of(manifest).differences(manifest, spec)
    positions = manifest.positions if isinstance(manifest, AutoregressiveManifest) else ""
    if positions == "linear" and spec.vision is not None:
        yield (
            "positions: after an image its draft counts on the target's temporal axis, the "
            "manifest counts every row"
        )
    if mode != "chain":
        yield f"speculation.mode: it has no trees; {mode} is written as a chain"
    if engine.weights or engine.quantise_head:
        yield "engine.weights: it reads the checkpoint, not this bundle's quantised weights"


def _values(name: str, target: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the templates."""
    folder = target if Path(target).is_dir() else None
    return {
        "tool_version": installed_version("trt-eagle3"),
        "version": VERSION,
        "name": name,
        "slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model",
        "target": shlex.quote(target),
        "model": json.dumps("/target" if folder else target),
        "target_folder": json.dumps(folder) if folder else None,
        "options": options,
    }


def _yaml(options: Mapping[str, Any]) -> bytes:
    head = f"# Written by trt-eagle3 for vLLM {VERSION}: options of vllm serve.\n"
    return (head + yaml.safe_dump(dict(options), sort_keys=False)).encode()
