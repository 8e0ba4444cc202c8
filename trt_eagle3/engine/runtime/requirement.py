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
            or raises if nothing is installed. fix: how to install it.
    """

    name: str
    look: Callable[[EngineConfig | None], str | None]
    fix: str = ""

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
    name = backend.requirement(engine)
    lacks = [need for need in backend.requirements()[name] if need.find(engine) is None]
    if not lacks:
        return None
    fixes = "; ".join(f"{n.name} ({n.fix})" if n.fix else n.name for n in lacks)
    return f"{name} needs {fixes}"


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
    return Requirement("GPU", _gpu, "a CUDA GPU, and a torch built for CUDA")


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
