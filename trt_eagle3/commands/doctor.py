"""doctor: what is installed here, what works with it, and what is missing for the rest."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from trt_eagle3.checkpoint.target import target_from_dict
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle import BundleRecord
from trt_eagle3.errors import EnvironmentMissingError, TrtEagle3Error, UserError

__all__ = ["Ability", "Diagnosis", "Finding", "check_bundle", "diagnose"]


@dataclass(frozen=True)
class Finding:
    """One thing that may be installed.

    ``value`` is None where it is not; ``fix`` says how it would be.
    """

    name: str
    value: str | None
    fix: str = ""


@dataclass(frozen=True)
class Ability:
    """Something that can be done here, or what it lacks (names of findings)."""

    name: str
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    def to_dict(self) -> dict[str, Any]:
        """What ``doctor --json`` prints."""
        abilities = [
            {**asdict(a), "works": not a.lacks, "lacks": list(a.lacks)} for a in self.abilities
        ]
        return {"installed": [asdict(f) for f in self.findings], "abilities": abilities}

    def tables(self) -> tuple[Table, Table]:
        """For people: what there is, and what works."""
        there = Table("what", "found", "to get it", box=None, pad_edge=False, header_style="bold")
        for finding in self.findings:
            found = escape(finding.value) if finding.value else "[red]missing[/]"
            there.add_row(finding.name, found, "" if finding.value else escape(finding.fix))
        works = Table("what", "works", "lacks", box=None, pad_edge=False, header_style="bold")
        for ability in self.abilities:
            works.add_row(
                ability.name,
                "[red]no[/]" if ability.lacks else "[green]yes[/]",
                ", ".join(ability.lacks),
            )
        return there, works

    def check(self, name: str) -> None:
        """Raise where the ability ``name`` is lacking.

        Raises:
            EnvironmentMissingError: with what is missing and how to get it.
        """
        ability = next(a for a in self.abilities if a.name == name)
        if not ability.lacks:
            return
        fixes = {f.name: f.fix for f in self.findings}
        wanted = "; ".join(
            f"{lack}: {fixes[lack]}" if fixes[lack] else lack for lack in ability.lacks
        )
        raise EnvironmentMissingError(f"{name}: missing: {wanted}")


_NEEDS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime",),
    "torch on cpu": ("torch",),
    "torch on cuda": ("torch", "GPU"),
    "torch on cuda with our kernels": ("torch", "GPU", "kernel library"),
    "tensorrt": ("torch", "GPU", "TensorRT", "plugin library"),
    "build of plugins": ("nvcc", "cmake"),
    "graphs for tensorrt": ("onnx", "torch"),
}


def diagnose(engine: EngineConfig | None = None) -> Diagnosis:
    """Look at this machine, for a bundle's ``engine``; nothing of it fails because something is
    missing or broken.
    """
    findings = (
        Finding("python", f"{platform.python_version()} on {platform.machine()}"),
        _package("onnx"),
        _package("onnxruntime"),
        _package("transformers"),
        Finding("torch", _try(_torch), "pip install torch"),
        Finding("GPU", _try(_gpu), "a CUDA GPU, and a torch built for CUDA"),
        Finding("driver", _try(_driver), "NVIDIA's driver"),
        Finding("TensorRT", _try(_tensorrt), "pip install tensorrt (8.6, 10.x or 11.x)"),
        Finding(
            "trtexec",
            shutil.which("trtexec"),
            "part of TensorRT's archive and container; only build_engine.sh needs it",
        ),
        Finding("kernel library", _try(_kernels), "make plugins"),
        Finding(
            "plugin library",
            _try(lambda: _plugins(engine)),
            "make plugins TENSORRT_INCLUDE=<TensorRT's include folder>",
        ),
        Finding("nvcc", _try(_nvcc), "NVIDIA's CUDA toolkit, 12 or newer"),
        Finding("cmake", shutil.which("cmake"), "pip install cmake"),
    )
    found = {finding.name for finding in findings if finding.value}
    abilities = (
        Ability(name, tuple(need for need in needs if need not in found))
        for name, needs in _NEEDS.items()
    )
    return Diagnosis(findings, tuple(abilities))


def check_bundle(path: Path, record: BundleRecord, found: Diagnosis) -> None:
    """Raise where the bundle at ``path`` would not run on the machine of ``found``.

    Raises:
        EnvironmentMissingError: something is missing here.
        UserError: its graphs, processor or tuning table are damaged; its engines are that, not
            built, or built for another TensorRT, GPU or plugin library.
    """
    engine = record.config.engine
    found.check(f"torch on {engine.device}" if engine.backend == "torch" else engine.backend)
    check = _check_engine if engine.backend == "tensorrt" else _check_graph
    for graph in ("target", "vision", *(("fuse", "draft") if record.draft else ())):
        check(path / graph)
    from trt_eagle3.decode.plan import read_plan
    from trt_eagle3.multimodal import Processor

    read_plan(path, record.config.speculation, engine.device)
    Processor.from_directory(path / "processor", target_from_dict(record.target))


def _check_engine(folder: Path) -> None:
    from trt_eagle3.engine.trt.folder import EngineFolder

    EngineFolder(folder).check()


def _check_graph(folder: Path) -> None:
    import onnx

    file = folder / "model.onnx"
    try:
        graph = onnx.load(file, load_external_data=False).graph
    except Exception as error:  # protobuf's errors have no base class but Exception
        raise UserError(
            f"{file}: not readable: {' '.join(str(error).split())}. Rebuild the bundle."
        ) from error
    if not graph.output:
        raise UserError(f"{file}: holds no graph. Rebuild the bundle.")


def _try(look: Callable[[], str | None]) -> str | None:
    """What ``look`` finds; None where it finds nothing, whatever the reason."""
    try:
        return look()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError, TrtEagle3Error):
        return None


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, None, f"pip install {name}")


def _torch() -> str:
    import torch

    cuda = torch.version.cuda
    return f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"


def _gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    from trt_eagle3.engine.trt.versions import gpu_arch

    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    others = f", first of {count}" if count > 1 else ""
    return (
        f"{torch.cuda.get_device_name()} ({gpu_arch()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB "
        f"free{others})"
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.splitlines()[0].strip()


def _tensorrt() -> str:
    from trt_eagle3.engine.trt.versions import tensorrt

    return f"{tensorrt().__version__} ({Path(tensorrt().__file__).parent})"


def _kernels() -> str | None:
    from trt_eagle3.engine.torch import capi

    path = capi.library_path()
    return str(path) if path is not None and path.is_file() else None


def _plugins(engine: EngineConfig | None) -> str:
    """Loaded where TensorRT is there to load it, else only found."""
    from trt_eagle3.engine.trt.plugins import load_plugins, plugin_library_path

    path = plugin_library_path(engine)
    if path is None or not path.is_file():
        raise EnvironmentMissingError("no plugin library")
    if _try(_tensorrt) is None:
        return f"{path} (not loaded: no TensorRT)"
    return f"{load_plugins(engine)} (loads)"


def _nvcc() -> str | None:
    nvcc = shutil.which("nvcc") or (
        "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None
    )
    if nvcc is None:
        return None
    done = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=20
    )
    release = next(
        (
            word
            for line in done.stdout.splitlines()
            for word in line.split(", ")
            if "release" in word
        ),
        "",
    )
    return f"{nvcc} ({release})"
