"""Description of an engine in its folder's ``config.json``, and the check of it before TensorRT
loads the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from trt_eagle3.config import EngineConfig, TensorRTConfig
from trt_eagle3.engine.bundle.read import BUILD_SCRIPT
from trt_eagle3.engine.runtime.machine import gpu_arch
from trt_eagle3.engine.trt.dialects.registry import PACKAGES, find_dialect
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.graph.plugin_ops import PLUGIN_VERSION
from trt_eagle3.graph.states import decode_states
from trt_eagle3.io.json_file import read_json_object

__all__ = [
    "ENGINE_FILE",
    "ONNX_FOLDER",
    "RUNTIME_CACHE_FILE",
    "EngineDescription",
    "EngineFolder",
    "describe_engine",
]

ENGINE_FILE = "rank0.engine"
ONNX_FOLDER = "onnx"
RUNTIME_CACHE_FILE = "runtime.cache"
"""Kernels that TensorRT for RTX compiled on the machine that loaded the engine."""
_REBUILD = "Rebuild here: trt-eagle3 build --config <its config>"


class EngineDescription(BaseModel):
    """Compatibility of an engine: TensorRT's version, the GPU's architecture, our plugins' version;
    and its size in bytes.

    Attributes:
        package: import name of the TensorRT package. gpu_arch: several are joined by +.
        linear: which computes products with a 16-bit weight and no bias: our plugin, or TensorRT.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str = "tensorrt"
    tensorrt: str
    gpu_arch: str
    plugins: str
    num_bytes: int
    linear: Literal["plugin", "tensorrt"] = "tensorrt"


def describe_engine(
    config: TensorRTConfig, num_bytes: int, *, linear: bool = False
) -> EngineDescription:
    """Describe an engine of ``num_bytes`` that was built on this machine; ``linear``: our plugin
    computes its products.
    """
    dialect = find_dialect(config)
    arch = dialect.build_arch(config)
    assert arch is not None, "engines are built only where their GPU architecture is known"
    return EngineDescription(
        package=dialect.package,
        tensorrt=dialect.version,
        gpu_arch=arch,
        plugins=PLUGIN_VERSION,
        num_bytes=num_bytes,
        linear="plugin" if linear else "tensorrt",
    )


class EngineFolder:
    """``target/``, ``draft/``, ``fuse/`` or ``vision/`` of a TensorRT bundle.

    Attributes:
        intermediates: inner tensors that are outputs of the engine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = path / ENGINE_FILE
        self.onnx = path / ONNX_FOLDER / "model.onnx"
        raw = self._read_config()
        self.states = decode_states(raw.get("states", []), str(path / "config.json"))
        try:
            self.config = EngineConfig.model_validate(raw["build_config"]["engine"])
            self.intermediates: tuple[str, ...] = tuple(raw.get("intermediates", ()))
            self.facts = (
                EngineDescription.model_validate(raw["engine"]) if raw.get("engine") else None
            )
        except (KeyError, TypeError, ValidationError) as error:
            raise UserError(
                f"{path / 'config.json'}: damaged ({type(error).__name__}). {_REBUILD}"
            ) from error

    def _read_config(self) -> Any:
        file = self.path / "config.json"
        try:
            return read_json_object(file)
        except (OSError, UserError) as error:
            raise UserError(f"{file}: unreadable: {error}. {_REBUILD}") from error

    def check(self) -> None:
        """Refuse an engine that is missing, cut short, or built for another GPU or TensorRT.

        Raises:
            UserError: with the command that fixes it. EnvironmentMissingError: no CUDA device.
        """
        if not self.engine.is_file():
            raise UserError(
                f"{self.path}: its engine is not built yet. On a machine with TensorRT 10 or later "
                f"and the GPU, run: {self.path.parent / BUILD_SCRIPT}"
            )
        arch = gpu_arch()
        if arch is None:
            raise EnvironmentMissingError(
                f"{self.engine}: torch sees no CUDA device; TensorRT engines need one."
            )
        if self.facts is None:
            return
        self._check_description(self.facts, arch)
        num_bytes = self.engine.stat().st_size
        if num_bytes != self.facts.num_bytes:
            raise UserError(
                f"{self.engine}: expected {self.facts.num_bytes} bytes, got {num_bytes}. {_REBUILD}"
            )

    def _check_description(self, facts: EngineDescription, arch: str) -> None:
        dialect = find_dialect(self.config.tensorrt)
        label, fits = PACKAGES[dialect.package].label, dialect.runs_on(facts.gpu_arch, arch)
        for what, built, here, same in (
            (label, facts.tensorrt, dialect.version, facts.tensorrt == dialect.version),
            ("GPU architecture", facts.gpu_arch, arch, fits),
            ("plugin version", facts.plugins, PLUGIN_VERSION, facts.plugins == PLUGIN_VERSION),
        ):
            if not same:
                raise UserError(
                    f"{self.engine}: built for {what} {built}, this process has {here}. {_REBUILD}"
                )
