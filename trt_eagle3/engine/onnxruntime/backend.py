"""The ONNX Runtime backend: the default; float32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_eagle3.engine.runtime.backend import Library

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.builder.job import BuildJob, Written
    from trt_eagle3.engine.runtime.requirement import Requirement
    from trt_eagle3.engine.runtime.session import Session

__all__ = ["OnnxRuntimeBackend"]


class OnnxRuntimeBackend:
    """Implements ``engine.runtime.backend.Backend``."""

    name = "onnxruntime"
    exact_packages: Mapping[str, str] = {}

    def keeps_packed(
        self, config: EngineConfig, ref: QuantisedRef, *, experts: bool = False
    ) -> bool:
        """Return whether it stays packed: integers but experts', if activations are int8."""
        from trt_eagle3.engine.builder.packed_rules import matmul_nbits_takes

        return not experts and config.activations == "int8" and matmul_nbits_takes(ref)

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Write graphs next to whole weight files."""
        from trt_eagle3.engine.builder.write_graphs import write_graphs

        return write_graphs(folder, job, "onnxruntime")

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """Create an ``InferenceSession`` of the graph."""
        from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession

        return OnnxRuntimeSession(model, weights_root, intermediates, device)

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Return all inner tensors of the graph."""
        from trt_eagle3.engine.bundle.graph_files import tensors_inside

        return tensors_inside(folder)

    def check_folder(self, folder: Path) -> None:
        """Check that the graph can be read."""
        from trt_eagle3.engine.bundle.graph_files import check_graph_file

        check_graph_file(folder)

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """Return the only requirement: the package."""
        from trt_eagle3.engine.runtime.requirement import package

        return {self.name: (package("onnxruntime"),)}

    def requirement(self, config: EngineConfig) -> str:
        """Return the same key for every config."""
        del config
        return self.name

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Return none: all operators are ONNX Runtime's own."""
        del config
        return ()
