"""install-kernels: compile the CUDA kernels for the GPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.engine.kernels.libraries import installed_folder, kernel_sources
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.io.child_environment import child_environment

__all__ = ["InstalledKernels", "install_kernels"]

_TAIL = 2000  # characters of a failed build's output
_CAPABILITY = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
_CUDA = Path("/usr/local/cuda/bin")
_PROGRAMS = {  # how to install each
    "cmake": "pip install cmake",
    "nvcc": "install NVIDIA's CUDA toolkit 12 or newer",
}


@dataclass(frozen=True)
class InstalledKernels:
    """The compiled libraries, and their GPU architectures as CMake names them."""

    libraries: tuple[Path, ...]
    architectures: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "libraries": [str(path) for path in self.libraries],
            "architectures": list(self.architectures),
        }


def install_kernels(
    architectures: Sequence[str] = (),
    *,
    tensorrt_include: Path | None = None,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> InstalledKernels:
    """Compile the kernels' C library, and the plugin library if TensorRT's headers are given.

    Args:
        architectures: such as ``90``; by default, those of this machine's GPUs.
        tensorrt_include: the folder of NvInfer.h.
        folder: output folder; by default, the one where sessions look for libraries.
    Raises:
        EnvironmentMissingError: there are no sources, no compiler or no cmake; or there is no GPU
            and no architecture was given.
        UserError: an architecture is invalid, headers are missing, or the build failed.
    """
    sources = kernel_sources()
    if sources is None:
        raise EnvironmentMissingError(
            "install-kernels: the kernels' sources are not in this package. Install trt-eagle3 "
            "from a wheel or a checkout."
        )
    if tensorrt_include is not None and not (tensorrt_include / "NvInfer.h").is_file():
        raise UserError(f"--tensorrt-include {tensorrt_include}: no NvInfer.h there.")
    programs = {name: _program(name) for name in _PROGRAMS}
    wanted = tuple(_architecture(word) for word in architectures or _architectures_here())
    destination = folder or installed_folder()
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trt-eagle3-kernels-") as scratch:
        build = Path(scratch)
        progress("configuring")
        _run(
            [
                programs["cmake"],
                "-S",
                sources,
                "-B",
                build,
                *_options(wanted, programs["nvcc"], tensorrt_include),
            ]
        )
        progress("compiling (minutes)")
        _run([programs["cmake"], "--build", build, "--parallel", str(os.cpu_count() or 1)])
        libraries = [_put(file, destination) for file in sorted(build.rglob("libtrt_eagle3_*.so"))]
    if not libraries:
        raise UserError("install-kernels: cmake ended without a library. Report this.")
    return InstalledKernels(tuple(libraries), wanted)


def _options(
    architectures: Sequence[str], nvcc: str, tensorrt_include: Path | None
) -> list[str | Path]:
    options: list[str | Path] = [
        f"-DTRT_EAGLE3_ARCHITECTURES={';'.join(architectures)}",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
    ]
    if tensorrt_include is not None:
        options.append(f"-DTENSORRT_INCLUDE_DIR={tensorrt_include.absolute()}")
    return options


def _program(name: str) -> str:
    beside = _CUDA / name
    found = shutil.which(name) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise EnvironmentMissingError(f"install-kernels: no {name} here: {_PROGRAMS[name]}.")
    return found


def _architectures_here() -> list[str]:
    """Return the architectures of this machine's GPUs, such as ``90``."""
    try:
        done = subprocess.run(
            _CAPABILITY,
            env=child_environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentMissingError(
            "install-kernels: nvidia-smi lists no GPU. Give the architecture, for example "
            "--architecture 90"
        ) from error
    return sorted({line.strip().replace(".", "") for line in done.stdout.splitlines() if line})


def _architecture(word: str) -> str:
    """Return CMake's name for device code of one architecture; Hopper has extra instructions."""
    number = word.removeprefix("sm_").removesuffix("a")
    if not number.isdigit() or int(number) < 80:
        raise UserError(f"--architecture {word}: expected a number such as 80, 89, 90 or 120.")
    return "90a-real" if number == "90" else f"{number}-real"


def _run(command: Sequence[str | Path]) -> None:
    words = list(map(str, command))
    done = subprocess.run(
        words, env=child_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        output = " ".join((done.stdout + done.stderr)[-_TAIL:].split())
        raise UserError(f"install-kernels: {Path(command[0]).name} failed: ...{output}")


def _put(file: Path, folder: Path) -> Path:
    """Copy a library atomically: a session may look for it at the same time."""
    place = folder / file.name
    with file.open("rb") as library, atomic_file(place, mode=0o777) as stream:
        shutil.copyfileobj(library, stream)
    return place
