"""Engines of benchmarks: each has its own folder, shares weights, and its memory is measured."""

from __future__ import annotations

import json
import resource
import threading
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch

from trt_eagle3.atomic_io import write_file
from trt_eagle3.config import BuildConfig
from trt_eagle3.engine.builder.job import BuiltEngine
from trt_eagle3.engine.trt.build import build_engine
from trt_eagle3.engine.trt.dialects.registry import find_dialect
from trt_eagle3.engine.trt.folder import ENGINE_FILE, describe_engine
from trt_eagle3.engine.trt.packed_file import PACKED_FILE
from trt_eagle3.engine.trt.profiles import Profile
from trt_eagle3.errors import EnvironmentMissingError
from trt_eagle3.graph.states import encode_states, read_states
from trt_eagle3.graph.trt_export import WEIGHTS_FILE

__all__ = ["BuildMemory", "build_beside_weights", "build_line", "no_tensorrt"]


@dataclass(frozen=True)
class BuildMemory:
    """Peak memory of a build: of the host (bytes of this process), and of the GPU (all of it)."""

    host: int
    device: int


def build_beside_weights(
    folder: Path,
    graph: onnx.ModelProto,
    profiles: list[Profile],
    config: BuildConfig,
    timing_cache: Path,
) -> tuple[BuiltEngine, BuildMemory]:
    """Build ``graph``, whose weights lie one folder up.

    ``TensorRTSession`` opens ``folder / "model.onnx"``.
    """
    folder.mkdir()
    for weights in (WEIGHTS_FILE, PACKED_FILE):
        if (folder.parent / weights).exists():
            (folder / weights).hardlink_to(folder.parent / weights)
    write_file(folder / "model.onnx", graph.SerializeToString())
    with _Watch() as watch:
        built = build_engine(
            folder / "model.onnx", folder / ENGINE_FILE, profiles, config.engine, timing_cache
        )
    facts = describe_engine(config.engine.tensorrt, built.num_bytes).model_dump()
    described = {
        "build_config": config.model_dump(mode="json"),
        "states": encode_states(read_states(graph)),
        "engine": facts,
    }
    write_file(folder / "config.json", json.dumps(described).encode())
    return built, watch.memory


def build_line(kind: str, built: BuiltEngine, memory: BuildMemory) -> str:
    """Describe a build's cost and result in one line."""
    return (
        f"{kind}: built in {built.seconds:.0f} s, engine {built.num_bytes / 1e9:.2f} GB, "
        f"{built.num_layers} layers including {built.num_plugins} plugins, activations "
        f"{built.device_bytes / 1e6:.0f} MB; while building {memory.host / 1e9:.1f} GB of host and "
        f"{memory.device / 1e9:.1f} GB of device memory"
    )


def no_tensorrt() -> str:
    """Return why there is no TensorRT; "" if there is one."""
    try:
        find_dialect()
    except EnvironmentMissingError as error:
        return str(error)
    return ""


class _Watch:
    """Samples the memory while it is entered."""

    def __enter__(self) -> _Watch:
        self._start, _ = torch.cuda.mem_get_info()
        self._least = self._start
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.2):
            self._least = min(self._least, torch.cuda.mem_get_info()[0])

    @property
    def memory(self) -> BuildMemory:
        return BuildMemory(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, self._start - self._least
        )
