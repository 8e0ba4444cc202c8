"""The TensorRT backend: engines compiled with our plugins, for one GPU and one TensorRT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_eagle3.engine.runtime.backend import (
    Library,
    check_activations,
    check_compute_residual,
)
from trt_eagle3.engine.trt.dialects.registry import (
    PACKAGES,
    chips_without_fp8,
    held_weights,
    package_of,
    packs_by_plugin,
)

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

    def defaults(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """CUDA and float16, with a float32 residual stream beside float16."""
        values = {"device": "cuda", "dtype": "float16"}
        wide = {**values, **given}["dtype"] == "float16"
        return {**values, "residual": "float32"} if wide else values

    def batch_size(self, config: EngineConfig) -> int:
        """Fewer than the GPU could: an engine keeps memory for as many chunks of prompts."""
        del config
        return 16

    def check(self, config: EngineConfig) -> None:
        """Refuse the CPU, weights that no engine holds, and a float32 residual stream that no
        other type calls for.
        """
        if config.device != "cuda":
            raise ValueError(f"tensorrt runs on device: cuda, got {config.device}")
        check_activations(config)
        self._check_weights(config)
        if config.dtype != "float16":
            check_compute_residual(config)

    def _check_weights(self, config: EngineConfig) -> None:
        held = held_weights(config)
        if config.weights in {None, *held}:
            self._check_chips(config)
            return
        label = PACKAGES[package_of(config)].label
        if not held:
            raise ValueError(
                f"weights: engines of {label} hold none quantised in float32 or with "
                f"tensorrt.linear: tensorrt, got {config.weights}. Leave one of them out."
            )
        raise ValueError(
            f"weights: engines of {label} hold {' or '.join(held)}, got "
            f"{config.weights}. Leave it out, or use one of these."
        )

    def _check_chips(self, config: EngineConfig) -> None:
        without = chips_without_fp8(config.tensorrt.chips)
        if config.weights == "fp8" and without and not packs_by_plugin(config):
            raise ValueError(
                f"weights: fp8 and tensorrt.chips: {without[0]} has no FP8. Leave the chip out, "
                "use int4 or int8, or tensorrt.linear: plugin."
            )

    def keeps_packed(self, config: EngineConfig, ref: QuantisedRef) -> bool:
        """What our plugin multiplies, or the builder."""
        from trt_eagle3.engine.builder.packed_rules import builders_take, kernels_take, kind_of

        takes = kernels_take if packs_by_plugin(config) else builders_take
        return kind_of(ref) in held_weights(config) and takes(ref)

    def write(self, folder: Path, job: BuildJob) -> Written:
        """Engines where they can be built, else what their building needs."""
        from trt_eagle3.engine.trt.bundle import write_bundle

        return write_bundle(folder, job)

    def open(
        self, model: Path, weights_root: Path, intermediates: Sequence[str], device: str
    ) -> Session:
        """The engine in the folder of ``model``."""
        from trt_eagle3.engine.trt.session import TensorRTSession

        return TensorRTSession(model, weights_root, intermediates, device)

    def intermediates(self, folder: Path) -> frozenset[str]:
        """Those that are outputs of the engine."""
        from trt_eagle3.engine.trt.folder import EngineFolder

        return frozenset(EngineFolder(folder).intermediates)

    def check_folder(self, folder: Path) -> None:
        """Refuse an engine that is not built, or was built for something else."""
        from trt_eagle3.engine.trt.folder import EngineFolder

        EngineFolder(folder).check()

    def requirements(self) -> Mapping[str, tuple[Requirement, ...]]:
        """Of running with each package, of engines without a GPU where it builds such, of graphs
        without engines, and of building these with trtexec.
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
        """By ``engine.tensorrt.runtime``."""
        return _ability(package_of(config))

    def libraries(self, config: EngineConfig) -> tuple[Library, ...]:
        """Our kernels, our plugins, and what the package needs beside these."""
        from trt_eagle3.engine.torch.backend import kernel_library
        from trt_eagle3.engine.trt import plugins

        package = package_of(config)
        path, build = plugins.plugin_library_path(config), PACKAGES[package].build_plugins
        libraries = (kernel_library(), Library(plugins.PLUGINS_VARIABLE, path, build))
        companion = plugins.companion_path(package, path) if path else None
        if companion is None:
            return libraries
        there = companion if companion.is_file() else None
        return (*libraries, Library(plugins.COMPANION_VARIABLE, there, build))


def _ability(package: str) -> str:
    """What ``doctor`` calls running with ``package``: ``tensorrt``, ``tensorrt-rtx``."""
    return package.replace("_", "-")
