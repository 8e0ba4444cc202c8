"""The ``Backend`` protocol: one object per way to run a bundle's graphs.

Build, load, doctor, deploy and parity use it. ``backend_support`` defines which configs a backend
supports.

This module and the modules of ``BACKENDS`` are cheap to import. A method imports heavy packages
(torch, onnx, a runtime) when it needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trt_eagle3.errors import UserError

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.builder.job import BuildJob, Written
    from trt_eagle3.engine.runtime.collectives import Collectives
    from trt_eagle3.engine.runtime.requirement import Requirement
    from trt_eagle3.engine.runtime.session import Session

__all__ = [
    "BACKENDS",
    "Backend",
    "Library",
    "RankBackend",
    "all_backends",
    "backend_named",
]

BACKENDS: Mapping[str, str] = {
    "onnxruntime": "trt_eagle3.engine.onnxruntime.backend:OnnxRuntimeBackend",
    "torch": "trt_eagle3.engine.torch.backend:TorchBackend",
    "tensorrt": "trt_eagle3.engine.trt.backend:TensorRTBackend",
}
"""Name (``engine.backend``) -> import path of the backend's class."""


@dataclass(frozen=True)
class Library:
    """A library of this project that a backend loads.

    Attributes:
        variable: the environment variable that overrides its path. path: its file; None if it is
            not built. build: the command that builds it in a checkout.
    """

    variable: str
    path: Path | None
    build: str


class Backend(Protocol):
    """A way to run graphs; implemented in ``engine/<backend>/backend.py``."""

    @property
    def name(self) -> str:
        """The backend's key in ``BACKENDS``, also stored in ``bundle.json``."""
        ...

    @property
    def exact_packages(self) -> Mapping[str, str]:
        """Python packages that must have the same version at build and at load -> display name."""
        ...

    def keeps_packed(
        self, config: EngineConfig, ref: QuantisedRef, *, experts: bool = False
    ) -> bool:
        """Return whether the quantised weight ``ref`` stays packed in memory at run time.

        ``experts``: it is an expert's, or several experts' stacked.
        """
        ...

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Write graphs or engines, and their weights, into the bundle under ``folder``.

        Raises:
            UserError: the backend does not support the job, or weights are damaged.
            EnvironmentMissingError: the backend's installation is incomplete.
        """
        ...

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """Load a graph; see ``runtime.session.open_session``."""
        ...

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Return the intermediate tensors that sessions of the graph in ``folder`` can return."""
        ...

    def check_folder(self, folder: Path) -> None:
        """Check that the graph in a bundle's ``folder`` can be loaded here, without loading it.

        Raises:
            UserError: the graph is damaged, or was built for another machine.
        """
        ...

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """Return each configuration of this backend -> what it needs installed."""
        ...

    def requirement(self, config: EngineConfig) -> str:
        """Return the key of ``requirements()`` that a bundle with ``config`` needs."""
        ...

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Return this project's libraries that a bundle with ``config`` loads on this machine."""
        ...


@runtime_checkable
class RankBackend(Protocol):
    """A backend that runs a target on several devices (``engine.tensor_parallel``)."""

    def open_rank(
        self,
        model: Path,
        weights_root: Path,
        intermediates: Sequence[str],
        collectives: Collectives,
    ) -> Session:
        """Load this rank's part of a target graph, on the device of ``collectives``."""
        ...


def backend_named(name: str) -> Backend:
    """Return the backend called ``name``.

    Raises:
        UserError: there is no such backend; the message lists those that exist.
    """
    if name not in BACKENDS:
        raise UserError(
            f"engine.backend: expected one of {', '.join(sorted(BACKENDS))}, got {name!r}"
        )
    return _load(name)


def all_backends() -> Iterator[Backend]:
    """Yield every backend, in the order of ``BACKENDS``."""
    return map(_load, BACKENDS)


@cache
def _load(name: str) -> Backend:
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
