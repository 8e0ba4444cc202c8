"""Software and hardware that a feature needs, and how to detect it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from trt_eagle3.errors import TrtEagle3Error

if TYPE_CHECKING:
    from trt_eagle3.config import EngineConfig

__all__ = ["Requirement", "gpu", "missing_here", "package", "torch_package"]


@dataclass(frozen=True)
class Requirement:
    """One thing that may be installed.

    Attributes:
        look: describes what is installed, for a bundle's engine if one is given. It returns None
            or raises if nothing is installed. fix: how to install it, or what it must be.
        is_hardware: it cannot be installed; ``fix`` describes it.
    """

    name: str
    look: Callable[[EngineConfig | None], str | None]
    fix: str = ""
    is_hardware: bool = False

    @property
    def wanted(self) -> str:
        """Name and fix, in a sentence: ``onnx (pip install onnx)``, ``a CUDA GPU``."""
        if self.is_hardware or not self.fix:
            return self.fix or self.name
        return f"{self.name} ({self.fix})"

    def find(self, engine: EngineConfig | None = None) -> str | None:
        """Return what ``look`` finds; None if it finds nothing, for any reason."""
        try:
            return self.look(engine)
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError, TrtEagle3Error):
            return None


def missing_here(engine: EngineConfig) -> str | None:
    """Return what ``engine`` needs and this machine lacks, with the fixes; None if nothing."""
    from trt_eagle3.engine.runtime.backend import backend_named

    backend = backend_named(engine.backend)
    needs = backend.requirements()[backend.requirement(engine)]
    return "; ".join(need.wanted for need in needs if need.find(engine) is None) or None


def package(name: str) -> Requirement:
    """Require a Python package; it is described by its installed version."""

    def look(_: EngineConfig | None) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return Requirement(name, look, f"pip install {name}")


def torch_package() -> Requirement:
    """Require PyTorch; it is described with the CUDA version that it was built for."""
    return Requirement("torch", _torch, "pip install torch")


def gpu() -> Requirement:
    """Require a CUDA device that torch sees."""
    return Requirement("GPU", _gpu, "a CUDA GPU, and a torch built for CUDA", is_hardware=True)


def _torch(_: EngineConfig | None) -> str:
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"


def _gpu(_: EngineConfig | None) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    from trt_eagle3.engine.runtime.machine import gpu_arch

    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    others = f", first of {count}" if count > 1 else ""
    return (
        f"{torch.cuda.get_device_name()} ({gpu_arch()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB "
        f"free{others})"
    )
