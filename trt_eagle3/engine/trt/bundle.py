"""The TensorRT part of a bundle: engines where they can be built, else all that their building
needs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from trt_eagle3.atomic_io import write_file
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle import BUILD_SCRIPT, REFERENCE_ROOT
from trt_eagle3.engine.trt.build import Built, CopiesCacheError, build_engine
from trt_eagle3.engine.trt.folder import ENGINE_FILE, ONNX_FOLDER, describe_machine
from trt_eagle3.engine.trt.plugins import load_plugins
from trt_eagle3.engine.trt.profiles import Profile
from trt_eagle3.engine.trt.script import build_script
from trt_eagle3.engine.trt.versions import check_dtype, gpu_arch, tensorrt, uses_linear
from trt_eagle3.engine.weight_file import write_weights
from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.graph.states import encode_states, read_states
from trt_eagle3.graph.trt_export import WEIGHTS_FILE, trt_export, with_prefetch_safe

__all__ = ["Engines", "missing_for_engines", "write_engines"]


@dataclass(frozen=True)
class Engines:
    """What became of the graphs.

    Attributes:
        built: by graph. missing: why there is nothing built, with what is left to do; None where
            there is.
    """

    built: Mapping[str, Built]
    missing: str | None = None


def missing_for_engines(config: EngineConfig) -> str | None:
    """Why engines cannot be built on this machine; None where they can.

    Raises:
        UserError: a type that this TensorRT lacks. EnvironmentMissingError: TensorRT and a GPU, and
            no plugin library.
    """
    try:
        tensorrt()
    except EnvironmentMissingError as error:
        return str(error)
    if gpu_arch() is None:
        return "torch sees no CUDA device on this machine."
    check_dtype(config.dtype)
    load_plugins(config)
    return None


def write_engines(
    folder: Path,
    models: Mapping[str, onnx.ModelProto],
    profiles: Mapping[str, Sequence[Profile]],
    config: EngineConfig,
    timing_cache: Path,
    show: Callable[[str], object] = str,
) -> Engines:
    """Put the engines of ``models`` into the bundle at ``folder``, one after the other.

    Weights are written in the engine's type beside each graph; where its engine is built they go
    again, so that the disk never holds those of two graphs. Where nothing can be built they stay,
    with a script that builds.

    Args:
        models: ``graph.pair.build_graphs`` over checkpoints at ``REFERENCE_ROOT``.
    """
    missing, linear = missing_for_engines(config), uses_linear(config)
    built: dict[str, Built] = {}
    for name, model in models.items():
        onnx_folder = folder / name / ONNX_FOLDER
        _update_config(folder / name, {"states": encode_states(read_states(model))})
        show(f"{name}: weights")
        ready = trt_export(model, linear=linear)
        write_weights(ready, REFERENCE_ROOT, onnx_folder / WEIGHTS_FILE)
        if missing is None:
            tell = partial(_tell, show, name)
            built[name] = _build(
                folder / name, ready.model, profiles[name], config, linear, timing_cache, tell
            )
        else:
            write_file(onnx_folder / "model.onnx", ready.model.SerializeToString())
    if missing is not None:
        write_file(folder / BUILD_SCRIPT, build_script(profiles, config.tensorrt).encode(), 0o777)
    return Engines(built, missing)


def _tell(show: Callable[[str], object], graph: str, what: str) -> None:
    show(f"{graph}: {what}")


def _build(
    folder: Path,
    model: onnx.ModelProto,
    profiles: Sequence[Profile],
    config: EngineConfig,
    linear: bool,
    timing_cache: Path,
    show: Callable[[str], object],
) -> Built:
    """Attention reads its cache early where the built engine turns out to allow it."""

    def attempt(graph: onnx.ModelProto) -> Built:
        file = folder / ONNX_FOLDER / "model.onnx"
        write_file(file, graph.SerializeToString())
        return build_engine(file, folder / ENGINE_FILE, profiles, config, timing_cache, show)

    try:
        built = attempt(with_prefetch_safe(model))
    except CopiesCacheError:
        built = attempt(model)
    if not config.tensorrt.strip_weights:
        shutil.rmtree(folder / ONNX_FOLDER)
    facts = describe_machine(built.num_bytes, linear=linear).model_dump()
    _update_config(folder, {"engine": facts})
    return built


def _update_config(folder: Path, entries: Mapping[str, object]) -> None:
    """Add ``entries`` to a graph's ``config.json``."""
    file = folder / "config.json"
    write_file(file, json.dumps(json.loads(file.read_bytes()) | entries, indent=2).encode())
