"""The TensorRT backend: compiled engines with our plugins, for one GPU and one TensorRT version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trt_eagle3.engine.runtime.backend import Library
from trt_eagle3.engine.trt.dialects.registry import PACKAGES, package_of

if TYPE_CHECKING:
    from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
    from trt_eagle3.config import EngineConfig
    from trt_eagle3.engine.builder.job import BuildJob, Written
    from trt_eagle3.engine.runtime.requirement import Requirement
    from trt_eagle3.engine.runtime.session import Session

__all__ = ["TensorRTBackend"]


class TensorRTBackend:
    """Implements ``engine.runtime.backend.Backend``."""

    name = "tensorrt"
    exact_packages: Mapping[str, str] = {name: found.label for name, found in PACKAGES.items()}

    def keeps_packed(
        self, config: EngineConfig, ref: QuantisedRef, *, experts: bool = False
    ) -> bool:
        """Return whether our plugin, or the builder, multiplies the weight as stored."""
        from trt_eagle3.engine.builder.packed_rules import (
            builders_take,
            expert_kernels_take,
            kernels_take,
            kind_of,
        )

        tensorrt, dtype = config.tensorrt, config.dtype
        by_plugin = tensorrt.packs_by_plugin(dtype)
        takes = expert_kernels_take if experts else kernels_take if by_plugin else builders_take
        return kind_of(ref) in tensorrt.held_weights(dtype) and takes(ref)

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Write engines if they can be built here, else the files for building them later."""
        from trt_eagle3.engine.trt.bundle import write_bundle

        return write_bundle(folder, job)

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """Load the engine in the folder of ``model``."""
        from trt_eagle3.engine.trt.session import TensorRTSession

        return TensorRTSession(model, weights_root, intermediates, device)

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Return the intermediate tensors that are outputs of the engine."""
        from trt_eagle3.engine.trt.folder import EngineFolder

        return frozenset(EngineFolder(folder).intermediates)

    def check_folder(self, folder: Path) -> None:
        """Refuse an engine that is not built, or was built for another GPU or TensorRT."""
        from trt_eagle3.engine.trt.folder import EngineFolder

        EngineFolder(folder).check()

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """Return the requirements of each use: running with each package, building engines without
        a GPU, writing graphs without engines, and building engines with trtexec.
        """
        from trt_eagle3.engine.runtime.requirement import gpu, package, torch_package
        from trt_eagle3.engine.trt.requirements import plugin_library, tensorrt_package, trtexec

        running = {
            _ability(name): (torch_package(), gpu(), tensorrt_package(name), plugin_library())
            for name in PACKAGES
        }
        ahead = (package("onnx"), torch_package(), tensorrt_package("tensorrt_rtx"))
        return {
            **running,
            "engines for rtx": (*ahead, plugin_library()),
            "graphs for tensorrt": (package("onnx"), torch_package()),
            "build_engine.sh": (gpu(), trtexec(), plugin_library()),
        }

    def requirement(self, config: EngineConfig) -> str:
        """Return the key of ``engine.tensorrt.runtime``."""
        return _ability(package_of(config.tensorrt))

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Return our kernels, our plugins, and the package's companion library if it needs one."""
        from trt_eagle3.engine.torch.backend import kernel_library
        from trt_eagle3.engine.trt import plugins

        package = package_of(config.tensorrt)
        path, build = plugins.plugin_library_path(config.tensorrt), PACKAGES[package].build_plugins
        libraries = (kernel_library(), Library(plugins.PLUGINS_VARIABLE, path, build))
        companion = plugins.companion_path(package, path) if path else None
        if companion is None:
            return libraries
        there = companion if companion.is_file() else None
        return (*libraries, Library(plugins.COMPANION_VARIABLE, there, build))


def _ability(package: str) -> str:
    """Return doctor's name for running with ``package``: ``tensorrt``, ``tensorrt-rtx``."""
    return package.replace("_", "-")
