"""The torch backend: interprets graphs node by node, on the CPU, or on CUDA with our kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_eagle3.engine.kernels.libraries import INSTALL_KERNELS
from trt_eagle3.engine.runtime.backend import Library

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.builder.job import BuildJob, Written
    from trt_eagle3.engine.runtime.collectives import Collectives
    from trt_eagle3.engine.runtime.requirement import Requirement
    from trt_eagle3.engine.runtime.session import Session

__all__ = ["TorchBackend", "kernel_library"]


class TorchBackend:
    """Implements ``engine.runtime.backend.Backend`` and ``RankBackend``."""

    name = "torch"
    exact_packages: Mapping[str, str] = {}

    def keeps_packed(
        self, config: EngineConfig, ref: QuantisedRef, *, experts: bool = False
    ) -> bool:
        """Return whether it stays packed: on CUDA in 16 bits, if our kernels multiply it."""
        from trt_eagle3.engine.builder.packed_rules import expert_kernels_take, kernels_take

        takes = expert_kernels_take if experts else kernels_take
        return config.device == "cuda" and config.dtype != "float32" and takes(ref)

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Write graphs next to whole weight files."""
        from trt_eagle3.engine.builder.write_graphs import write_graphs

        return write_graphs(folder, job, "torch")

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """Load the graph as a program of torch operations."""
        from trt_eagle3.engine.torch.session import TorchSession

        return TorchSession(model, weights_root, intermediates, device)

    def open_rank(
        self,
        model: Path,
        weights_root: Path,
        intermediates: Sequence[str],
        collectives: Collectives,
    ) -> Session:
        """Load this rank's part of a target graph (``graph/shard.py``)."""
        from trt_eagle3.engine.torch.session import TorchSession

        device = collectives.device.type
        return TorchSession(model, weights_root, intermediates, device, collectives=collectives)

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Return all inner tensors of the graph."""
        from trt_eagle3.engine.bundle.graph_files import tensors_inside

        return tensors_inside(folder)

    def check_folder(self, folder: Path) -> None:
        """Check that the graph can be read."""
        from trt_eagle3.engine.bundle.graph_files import check_graph_file

        check_graph_file(folder)

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """Return what each device needs. Our kernels are optional: without them torch is slower."""
        from trt_eagle3.engine.runtime.requirement import Requirement, gpu, torch_package

        kernels = Requirement("kernel library", _look_for_kernels, INSTALL_KERNELS)
        return {
            "torch on cpu": (torch_package(),),
            "torch on cuda": (torch_package(), gpu()),
            "torch on cuda with our kernels": (torch_package(), gpu(), kernels),
        }

    def requirement(self, config: EngineConfig) -> str:
        """Return the key of the config's device."""
        return f"torch on {config.device}"

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Return our kernel library, if the device is CUDA."""
        return (kernel_library(),) if config.device == "cuda" else ()


def kernel_library() -> Library:
    """The library of our kernels. On CUDA the KV cache uses one of them with every backend."""
    from trt_eagle3.engine.capi import LIBRARY_VARIABLE, library_path

    return Library(LIBRARY_VARIABLE, library_path(), INSTALL_KERNELS)


def _look_for_kernels(_: EngineConfig | None) -> str | None:
    path = kernel_library().path
    return str(path) if path is not None and path.is_file() else None
