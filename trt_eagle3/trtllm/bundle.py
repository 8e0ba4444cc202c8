"""deploy: a bundle as input of TensorRT-LLM's own runtime."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import yaml

from trt_eagle3.atomic_io import FolderKind, atomic_directory, check_replaceable, create_file
from trt_eagle3.checkpoint.convert import convert_draft
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.config import BuildConfig
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.engine.bundle import BundleRecord, SourceRecord
from trt_eagle3.engine.output_check import (
    check_apart,
    check_not_around,
    source_folders,
    weight_paths,
)
from trt_eagle3.errors import UserError
from trt_eagle3.io.template import render
from trt_eagle3.spec import TargetSpec
from trt_eagle3.trtllm.schema import Version, resolve_version

__all__ = ["RuntimeBundle", "deploy", "llm_api_config"]

_KIND = FolderKind("folder for TensorRT-LLM")
_TRITON = {"max_batch_size": 0, "decoupled": True}


@dataclass(frozen=True)
class RuntimeBundle:
    """What was written: the folder, the version it is for, and what a user should know, one line
    each.
    """

    path: Path
    version: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"path": str(self.path), "version": self.version, "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """For a terminal."""
        notes = [f"note: {note}" for note in self.notes]
        return [
            f"wrote {self.path} for TensorRT-LLM {self.version}",
            *notes,
            f"next: {self.path}/serve.sh",
        ]


def deploy(
    bundle: Path, repository: Path, *, runtime_version: str = "1.4", tensor_parallel_size: int = 1
) -> RuntimeBundle:
    """Write ``repository``, whole or not at all: the draft normalised, the LLM API's options, how
    to serve it.

    Raises:
        UserError: an unknown version, a draft that the runtime cannot express, heads that do not
            divide, a folder with other things in it.
    """
    release = resolve_version(runtime_version)
    loaded = LoadedBundle.open(bundle)
    spec, manifest, config = loaded.spec, loaded.manifest, loaded.record.config
    _check_heads(spec, tensor_parallel_size)
    _check_place(bundle, repository, loaded.record)
    target = _target(loaded.record.sources["target"])
    notes = tuple(_differences(manifest, spec, config, release))
    with atomic_directory(repository, _KIND) as folder:
        if manifest:
            convert_draft(manifest, folder / "draft", "tensorrt-llm")
            (folder / "draft" / "speculative_config.yaml").unlink()  # llm_api.yaml says it all
        options = llm_api_config(config, manifest, release, tensor_parallel_size, "draft")
        _write_yaml(folder / "llm_api.yaml", options, release)
        # Triton starts elsewhere, so there the draft has its whole path
        options = llm_api_config(
            config, manifest, release, tensor_parallel_size, str(repository.absolute() / "draft")
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
            create_file(folder / name, render("trt_eagle3.trtllm", name, values), mode)
    return RuntimeBundle(repository, release.name, notes)


def llm_api_config(
    config: BuildConfig,
    manifest: DraftManifest | None,
    release: Version,
    tensor_parallel_size: int,
    draft: str,
) -> dict[str, Any]:
    """Options of the LLM API, without the target; ``draft`` is where the draft lies."""
    options: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": tensor_parallel_size,
        "max_batch_size": config.limits.max_batch_size,
        "max_seq_len": config.limits.max_seq_len,
        "kv_cache_config": {
            "enable_block_reuse": config.limits.prefix_cache,
            "free_gpu_memory_fraction": 0.85,
        },
    }
    if manifest is not None:
        options["speculative_config"] = {
            "decoding_type": release.decoding_type,
            release.draft_field: draft,
            "max_draft_len": config.speculation.steps,
            "eagle3_layers_to_capture": list(manifest.aux_layers),
            **_tree(config, release),
        }
    release.check(options)
    return options


def _tree(config: BuildConfig, release: Version) -> dict[str, Any]:
    speculation = config.speculation
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
    manifest: DraftManifest | None, spec: TargetSpec, config: BuildConfig, release: Version
) -> Iterator[str]:
    """Where the runtime's own reading of a draft is not the manifest's."""
    if manifest is None:
        return
    caught = [k for k in manifest.aux_layers if spec.layers[k].visual_level is not None]
    if manifest.aux_pre_deepstack and caught:
        yield (
            f"aux_pre_deepstack: it takes out({caught}) after the deepstack level is added, here "
            "before"
        )
    if manifest.image_rows != "pad":
        yield (
            "image_rows: its draft sees the pad token's embedding at image positions, here the "
            "vision rows"
        )
    if manifest.positions == "3d":
        yield "positions: its draft counts rope positions on one axis, here on the target's three"
    if manifest.position_shift:
        yield f"position_shift: it knows none, here {manifest.position_shift}"
    if config.speculation.mode == "tree":
        yield "speculation.mode: it has no static trees; written as a chain"
    if config.speculation.mode == "dynamic" and not release.dynamic_trees:
        yield f"speculation.mode: dynamic trees do not work in {release.name}; written as a chain"


def _check_heads(spec: TargetSpec, size: int) -> None:
    heads = spec.attention.num_heads
    if size < 1 or heads % size:
        raise UserError(
            f"--tensor-parallel-size {size}: expected a divisor of the target's {heads} attention "
            "heads."
        )


def _check_place(bundle: Path, repository: Path, record: BundleRecord) -> None:
    if bundle.resolve().is_relative_to(repository.resolve()) or repository.resolve().is_relative_to(
        bundle.resolve()
    ):
        raise UserError(f"{repository}: overlaps with the bundle. Name another folder.")
    check_apart(repository, source_folders(record), "the checkpoint")
    check_not_around(repository, weight_paths(bundle, record), "the weight file")
    check_replaceable(repository, _KIND)


def _target(source: SourceRecord) -> str:
    """The checkpoint's folder, or its Hub id where the folder is gone."""
    return str(Path(source.path).absolute()) if Path(source.path).is_dir() else source.checkpoint


def _write_yaml(file: Path, options: Mapping[str, Any], release: Version) -> None:
    head = (
        f"# Written by trt-eagle3 for TensorRT-LLM {release.name}; other versions have other "
        "field names.\n"
    )
    create_file(file, (head + yaml.safe_dump(dict(options), sort_keys=False)).encode())
