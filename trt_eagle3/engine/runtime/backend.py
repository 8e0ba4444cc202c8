"""Backend: what runs a bundle's graphs, as one object that build, load, doctor, deploy and parity
use. What a config may ask of it is in ``backend_support``.

This module and the modules of ``BACKENDS`` are cheap to import: what is heavy (torch, onnx, a
runtime) is imported where a method needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trt_eagle3.errors import UserError

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.builder.job import BuildJob, Written
    from trt_eagle3.engine.runtime.requirement import Requirement
    from trt_eagle3.engine.runtime.session import Session

__all__ = [
    "BACKENDS",
    "Backend",
    "Library",
    "all_backends",
    "backend_named",
]

BACKENDS: Mapping[str, str] = {
    "onnxruntime": "trt_eagle3.engine.onnxruntime.backend:OnnxRuntimeBackend",
    "torch": "trt_eagle3.engine.torch.backend:TorchBackend",
    "tensorrt": "trt_eagle3.engine.trt.backend:TensorRTBackend",
}
"""Name (``engine.backend``) -> the class of its one object."""


@dataclass(frozen=True)
class Library:
    """A library of ours that a backend loads.

    Attributes:
        variable: the environment variable that names it. path: where it is; None where it is not
            built. build: the command that builds it in a checkout.
    """

    variable: str
    path: Path | None
    build: str


class Backend(Protocol):
    """One way to run graphs; implemented in ``engine/<backend>/backend.py``."""

    @property
    def name(self) -> str:
        """Its key in ``BACKENDS``, and what ``bundle.json`` calls it."""
        ...

    @property
    def exact_packages(self) -> Mapping[str, str]:
        """Python packages that a bundle runs with in the version of its build and no other -> what
        users call them.
        """
        ...

    def keeps_packed(self, config: EngineConfig, ref: QuantisedRef) -> bool:
        """Whether a quantised weight stays so in memory where it runs."""
        ...

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Put graphs or engines into the bundle that is being made in ``folder``, with the weights
        that they want.

        Raises:
            UserError: the job asks for what the backend cannot do, or weights are damaged.
            EnvironmentMissingError: its installation here is incomplete.
        """
        ...

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """Load a graph; as ``runtime.session.open_session``."""
        ...

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Inner tensors that sessions of the graph in ``folder`` can return."""
        ...

    def check_folder(self, folder: Path) -> None:
        """Refuse a graph's ``folder`` of a bundle that cannot be loaded here, without loading it.

        Raises:
            UserError: it is damaged, or was made for something else than this machine has.
        """
        ...

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """What this backend can do -> what each of these needs to be installed."""
        ...

    def requirement(self, config: EngineConfig) -> str:
        """The key of ``requirements()`` that a bundle with ``config`` needs."""
        ...

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Libraries of ours that a bundle with ``config`` loads, as found on this machine."""
        ...


def backend_named(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        UserError: there is none of that name; it lists those there are.
    """
    if name not in BACKENDS:
        raise UserError(
            f"engine.backend: expected one of {', '.join(sorted(BACKENDS))}, got {name!r}"
        )
    return _load(name)


def all_backends() -> Iterator[Backend]:
    """Every backend, in the order of ``BACKENDS``."""
    return map(_load, BACKENDS)


@cache
def _load(name: str) -> Backend:
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
