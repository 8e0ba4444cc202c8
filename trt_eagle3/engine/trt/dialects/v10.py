"""TensorRT 10: strongly typed networks, plugins of version 3, progress, stripped engines."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.trt.dialects.dialect import Dialect

__all__ = ["TensorRT10"]


class TensorRT10(Dialect):
    """TensorRT from 10.0 on; features of later 10.x versions are detected."""

    def create_network(self, builder: Any) -> Any:
        """Create a strongly typed network: it uses the graph's types."""
        flag = self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        return builder.create_network(1 << int(flag))

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Allow plugins to write into their inputs. From 10.3 on, ours declare that they do, and
        without this setting the builder refuses them.
        """
        super().configure(settings, network, config, wide)
        feature = getattr(self.trt.PreviewFeature, "ALIASED_PLUGIN_IO_10_03", None)
        if feature is not None:
            settings.set_preview_feature(feature, True)

    def strip_weights(self, settings: Any) -> None:
        """Set ``STRIP_PLAN``."""
        settings.set_flag(self.trt.BuilderFlag.STRIP_PLAN)

    def show_progress(
        self, settings: Any, show: Callable[[str], object], stop: Callable[[], bool]
    ) -> None:
        """Set an ``IProgressMonitor``."""
        settings.progress_monitor = _monitor(self.trt, show, stop)

    def find_creator(self, plugin: str, version: str) -> Any | None:
        """Return a creator of any plugin interface."""
        return self.trt.get_plugin_registry().get_creator(plugin, version, "")

    def device_bytes(self, engine: Any) -> int:
        """Return ``device_memory_size_v2`` from 10.1 on, ``device_memory_size`` before."""
        wanted = getattr(engine, "device_memory_size_v2", None)
        return int(engine.device_memory_size if wanted is None else wanted)

    def create_context(
        self, engine: Any, options: Any = None, *, captured: bool = False
    ) -> Any | None:
        """Create a context whose memory the user manages."""
        del options, captured
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        return engine.create_execution_context(strategy)

    def give_memory(self, context: Any, address: int, num_bytes: int) -> None:
        """Set address and size; 10.0 takes only the address."""
        give = getattr(context, "set_device_memory", None)
        if give is None:
            context.device_memory = address
        else:
            give(address, num_bytes)

    def read_weights(self, engine: Any, onnx_file: str) -> bool:
        """Use ``OnnxParserRefitter``."""
        refitter = self.create("Refitter", engine)
        parser = self.create("OnnxParserRefitter", refitter)
        return bool(parser.refit_from_file(onnx_file) and refitter.refit_cuda_engine())


def _monitor(trt: Any, show: Callable[[str], object], stop: Callable[[], bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if total := self._steps.get(phase_name):  # ``step`` is complete; the first is 0
                show(f"{phase_name}, {100 * (step + 1) // total} %")
            return not stop()

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()
