"""Diagnose this machine: what is installed, what works, and what is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.text import Text

from trt_eagle3.checkpoint.target import target_from_dict
from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.bundle.record import BundleRecord
from trt_eagle3.engine.runtime.backend import all_backends, backend_named
from trt_eagle3.engine.runtime.requirement import Requirement, package
from trt_eagle3.errors import EnvironmentMissingError, TrtEagle3Error
from trt_eagle3.io.child_environment import child_environment
from trt_eagle3.io.terminal_text import TextTable

__all__ = [
    "Ability",
    "Diagnosis",
    "Finding",
    "BundleStatus",
    "bundle_line",
    "check_bundle",
    "diagnose",
    "bundle_status",
]


@dataclass(frozen=True)
class Finding:
    """One component that may be installed.

    ``value`` is None if it is missing; ``fix`` is the way to install it.
    """

    name: str
    value: str | None
    fix: str = ""


@dataclass(frozen=True)
class Ability:
    """One capability of this machine, with the names of the findings that it lacks."""

    name: str
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All findings and abilities of this machine."""

    findings: tuple[Finding, ...]
    abilities: tuple[Ability, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the output of ``doctor --json``."""
        abilities = [
            {**asdict(a), "works": not a.lacks, "lacks": list(a.lacks)} for a in self.abilities
        ]
        return {"installed": [asdict(f) for f in self.findings], "abilities": abilities}

    def tables(self) -> tuple[TextTable, TextTable]:
        """Return tables for a terminal: the components, and what works."""
        there = TextTable("what", "found", "to get it")
        for finding in self.findings:
            found = finding.value or Text("missing", "red")
            there.add_row(finding.name, found, "" if finding.value else finding.fix)
        works = TextTable("what", "works", "lacks")
        for ability in self.abilities:
            mark = Text("no", "red") if ability.lacks else Text("yes", "green")
            works.add_row(ability.name, mark, ", ".join(ability.lacks))
        return there, works

    def check_engine(self, engine: EngineConfig) -> None:
        """Check that everything that ``engine`` needs is installed.

        Raises:
            EnvironmentMissingError: something is missing; the message names it and its fix.
        """
        name = backend_named(engine.backend).requirement(engine)
        ability = next(a for a in self.abilities if a.name == name)
        if not ability.lacks:
            return
        fixes = {f.name: f.fix for f in self.findings}
        wanted = "; ".join(
            f"{lack}: {fixes[lack]}" if fixes[lack] else lack for lack in ability.lacks
        )
        raise EnvironmentMissingError(f"{name}: missing: {wanted}")


@dataclass(frozen=True)
class BundleStatus:
    """Whether a bundle runs on this machine.

    Attributes:
        capacity: sequences and tokens that fit; empty if it does not run.
        error: the reason why it does not run; None if it runs.
    """

    path: Path
    capacity: str
    error: TrtEagle3Error | None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "path": str(self.path),
            "runs": self.error is None,
            "capacity": self.capacity,
            "why_not": str(self.error or ""),
        }


def diagnose(engine: EngineConfig | None = None) -> Diagnosis:
    """Diagnose this machine, for a bundle's ``engine``.

    Missing or broken components never raise.
    """
    abilities = _abilities()
    wanted = {need.name: need for need in [*_GENERAL, *chain(*abilities.values())]}
    findings = tuple(Finding(n.name, n.find(engine), n.fix) for n in wanted.values())
    found = {finding.name for finding in findings if finding.value}
    lacks = {
        name: tuple(need.name for need in needs if need.name not in found)
        for name, needs in abilities.items()
    }
    return Diagnosis(findings, tuple(Ability(name, lack) for name, lack in lacks.items()))


def _abilities() -> dict[str, tuple[Requirement, ...]]:
    """Return what each ability requires, for all abilities of a complete installation."""
    backends = {n: r for b in all_backends() for n, r in b.requirements().items()}
    return {**backends, "build of plugins": _BUILD_OF_PLUGINS}


def check_bundle(path: Path, record: BundleRecord, found: Diagnosis) -> None:
    """Check that the bundle at ``path`` would run on the machine of ``found``.

    Raises:
        EnvironmentMissingError: something is missing here.
        UserError: its graphs, processor or tuning table are damaged. Or its engines are damaged,
            not built, or built for another TensorRT, GPU or plugin library.
    """
    engine = record.config.engine
    found.check_engine(engine)
    backend = backend_named(engine.backend)
    for graph in record.graphs:
        backend.check_folder(path / graph)
    from trt_eagle3.decode.policy.read import read_policy
    from trt_eagle3.families.registry import family_of

    read_policy(path, record.config.speculation, engine.device)
    spec = target_from_dict(record.target)
    family_of(spec).processor(path / "processor", spec)


def bundle_status(path: Path, record: BundleRecord, found: Diagnosis) -> BundleStatus:
    """Return whether the bundle at ``path`` runs on the machine of ``found``, and its capacity."""
    from trt_eagle3.decode.loaded_bundle import LoadedBundle

    try:
        check_bundle(path, record, found)
        return BundleStatus(path, LoadedBundle.open(path).capacity, None)
    except TrtEagle3Error as error:
        return BundleStatus(path, "", error)


def bundle_line(path: Path, record: BundleRecord) -> str:
    """Return the versions and GPUs that the bundle at ``path`` was built for."""
    engine = record.engine
    labels = backend_named(engine.backend).exact_packages
    found = [f"{labels[name]} {at}" for name, at in engine.versions.items() if name in labels]
    made = f" by {' and '.join(found)}" if found else ""
    chips = f" for {engine.gpu_arch.replace('+', ', ')}" if engine.gpu_arch else ""
    kv = ", FP8 KV cache" if record.config.engine.kv_dtype == "fp8" else ""
    return f"{path}: backend {engine.backend}, {engine.dtype}{kv}, built{made}{chips}"


def _output(command: list[str]) -> str:
    environment = child_environment()
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=20
    ).stdout


def _driver(_: EngineConfig | None) -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output(command).splitlines()[0].strip()


def _python(_: EngineConfig | None) -> str:
    return f"{platform.python_version()} on {platform.machine()}"


def _nvcc(_: EngineConfig | None) -> str | None:
    nvcc = shutil.which("nvcc") or (
        "/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None
    )
    if nvcc is None:
        return None
    release = next(
        (
            word
            for line in _output([nvcc, "--version"]).splitlines()
            for word in line.split(", ")
            if "release" in word
        ),
        "",
    )
    return f"{nvcc} ({release})"


_GENERAL = (
    Requirement("python", _python),
    package("onnx"),
    package("transformers"),
    Requirement("driver", _driver, "NVIDIA's driver"),
)
_BUILD_OF_PLUGINS = (
    Requirement("nvcc", _nvcc, "NVIDIA's CUDA toolkit, 12 or newer"),
    Requirement("cmake", lambda _: shutil.which("cmake"), "pip install cmake"),
)
