"""Deploy a bundle as input of TensorRT-LLM's own runtime."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import yaml

from trt_eagle3.atomic_io import FolderKind, atomic_directory, create_file
from trt_eagle3.checkpoint.manifest import AutoregressiveManifest, DraftManifest
from trt_eagle3.config import LimitsConfig, SpeculationConfig
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
from trt_eagle3.runtimes.tensorrt_llm.schema import Version, resolve_version
from trt_eagle3.spec import TargetSpec

__all__ = ["deploy", "llm_api_config"]

_KIND = FolderKind("folder for TensorRT-LLM")
_TRITON = {"max_batch_size": 0, "decoupled": True}


def deploy(
    bundle: Path, repository: Path, *, runtime_version: str = "1.4", tensor_parallel_size: int = 1
) -> RuntimeFolder:
    """Write ``repository``, whole or not at all.

    It has the normalised draft, the options of the LLM API, and the files that serve them.

    Raises:
        UserError: an unknown version, a draft that the runtime cannot express, a size that does not
            divide the heads, a folder with other files.
    """
    release = resolve_version(runtime_version)
    loaded = LoadedBundle.open(bundle)
    spec, manifest, config = loaded.spec, loaded.manifest, loaded.record.config
    limits, speculation = config.limits, config.speculation
    check_heads(spec, tensor_parallel_size)
    _check_kind(bundle, manifest, release)
    check_place(bundle, repository, loaded.record, _KIND)
    target = target_source(loaded.record.sources["target"])
    notes = tuple(_differences(manifest, spec, speculation.mode, release))
    with atomic_directory(repository, _KIND) as folder:
        if manifest and not kind_of(manifest).in_target:
            architecture = family_of(spec).architecture
            kind_of(manifest).export(manifest, folder / "draft", "tensorrt-llm", architecture)
            (folder / "draft" / "speculative_config.yaml").unlink()  # llm_api.yaml has it all
        options = llm_api_config(
            limits, speculation, manifest, release, tensor_parallel_size, "draft"
        )
        _write_yaml(folder / "llm_api.yaml", options, release)
        # Triton starts in another directory, so this path is absolute
        options = llm_api_config(
            limits,
            speculation,
            manifest,
            release,
            tensor_parallel_size,
            str(repository.absolute() / "draft"),
        )
        release.check({"model": target} | options)
        options |= {"model": target, "triton_config": {**_TRITON, **release.triton}}
        _write_yaml(folder / "triton/tensorrt_llm/1/model.yaml", options, release)
        values = {
            "tool_version": installed_version("trt-eagle3"),
            "version": release,
            "target": shlex.quote(target),
            "name": config.name,
            "notes": notes,
        }
        for name in ("serve.sh", "README.md"):
            mode = 0o777 if name == "serve.sh" else 0o666
            create_file(
                folder / name, render("trt_eagle3.runtimes.tensorrt_llm", name, values), mode
            )
    return RuntimeFolder(repository, "TensorRT-LLM", release.name, notes)


def _check_kind(bundle: Path, manifest: DraftManifest | None, release: Version) -> None:
    """Refuse a kind of draft that the runtime does not support."""
    if manifest is not None and not kind_of(manifest).tensorrt_llm:
        raise UserError(
            f"{bundle}: TensorRT-LLM {release.name} does not support this target's "
            f"{kind_of(manifest).title}. Use --target vllm, or build with an EAGLE-3 draft."
        )


def llm_api_config(
    limits: LimitsConfig,
    speculation: SpeculationConfig,
    manifest: DraftManifest | None,
    release: Version,
    tensor_parallel_size: int,
    draft: str,
) -> dict[str, Any]:
    """Return the options of the LLM API, without the target; ``draft`` is the draft's path."""
    options: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": tensor_parallel_size,
        "max_batch_size": limits.max_batch_size,
        "max_seq_len": limits.max_seq_len,
        "kv_cache_config": {
            "enable_block_reuse": limits.prefix_cache,
            "free_gpu_memory_fraction": 0.85,
        },
    }
    if manifest is not None:
        options["speculative_config"] = {
            "decoding_type": release.decoding_type,
            release.draft_field: draft,
            "max_draft_len": speculation.steps,
            "eagle3_layers_to_capture": list(manifest.aux_layers),
            **_tree(speculation, release),
        }
    release.check(options)
    return options


def _tree(speculation: SpeculationConfig, release: Version) -> dict[str, Any]:
    if speculation.mode != "dynamic" or not release.dynamic_trees:
        return {}
    widest = speculation.topk * speculation.steps
    # without the root
    wanted = widest if speculation.num_draft_tokens is None else speculation.num_draft_tokens - 1
    tokens = min(max(wanted, speculation.steps), widest)
    return {
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": speculation.topk,
        "max_total_draft_tokens": tokens,
    }


def _differences(
    manifest: DraftManifest | None, spec: TargetSpec, mode: str, release: Version
) -> Iterator[str]:
    """Yield notes where the runtime's interpretation of a draft differs from the manifest's."""
    if manifest is None:
        return
    yield from kind_of(manifest).differences(manifest, spec)
    if isinstance(manifest, AutoregressiveManifest) and manifest.positions == "3d":
        yield "positions: its draft uses one rope axis, the manifest the target's three"
    if mode == "tree":
        yield "speculation.mode: it has no static trees; written as a chain"
    if mode == "dynamic" and not release.dynamic_trees:
        yield f"speculation.mode: dynamic trees do not work in {release.name}; written as a chain"


def _write_yaml(file: Path, options: Mapping[str, Any], release: Version) -> None:
    head = (
        f"# Written by trt-eagle3 for TensorRT-LLM {release.name}; other versions have other "
        "field names.\n"
    )
    create_file(file, (head + yaml.safe_dump(dict(options), sort_keys=False)).encode())
