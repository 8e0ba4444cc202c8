"""TensorRT 8.6: types set by layer, no bfloat16, products better computed by our plugin."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from trt_eagle3.config import EngineConfig
from trt_eagle3.engine.trt.dialects.dialect import Dialect
from trt_eagle3.errors import UserError

__all__ = ["TensorRT86"]

_COMPUTING = (
    "ACTIVATION",
    "ELEMENTWISE",
    "UNARY",
    "REDUCE",
    "SOFTMAX",
    "MATRIX_MULTIPLY",
    "NORMALIZATION",
)


class TensorRT86(Dialect):
    """TensorRT 8.6; it computes matrix products as convolutions between layout copies."""

    dtypes = ("float32", "float16")
    default_level = 2  # level 3, TensorRT's default, took over four minutes for four layers
    weakly_typed = True
    linear_by_plugin = True

    def create_network(self, builder: Any) -> Any:
        """Create a weakly typed network."""
        flag = self.trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH
        return builder.create_network(1 << int(flag))

    def configure(
        self, settings: Any, network: Any, config: EngineConfig, wide: Collection[str]
    ) -> None:
        """Force the layers of ``wide`` to float32; leave the others free.

        The builder may compute any layer of a float16 network in half. The other layers' tensors
        are declared float32 for any graph. Forcing those would double the memory of
        matrix products.
        """
        super().configure(settings, network, config, wide)
        # later versions always do this: one context per graph
        settings.set_preview_feature(self.trt.PreviewFeature.PROFILE_SHARING_0806, True)
        if config.dtype != "float32":
            settings.set_flag(self.trt.BuilderFlag.FP16)
            self._hold(settings, network, wide)

    def _hold(self, settings: Any, network: Any, wide: Collection[str]) -> None:
        trt = self.trt
        computing = {getattr(trt.LayerType, name) for name in _COMPUTING}
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.name in wide and layer.type in computing:
                settings.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
                layer.precision = trt.float32
                layer.set_output_type(0, trt.float32)

    def strip_weights(self, settings: Any) -> None:
        """Refuse: 8.6 cannot strip weights."""
        del settings
        raise UserError(
            f"engine.tensorrt.strip_weights needs TensorRT 10 or later, this is {self.version}."
        )

    def find_creator(self, plugin: str, version: str) -> Any | None:
        """Return a creator of ``IPluginV2``."""
        return self.trt.get_plugin_registry().get_plugin_creator(plugin, version, "")

    def device_bytes(self, engine: Any) -> int:
        """Return the engine's one number for all profiles."""
        return int(engine.device_memory_size)

    def create_context(
        self, engine: Any, options: Any = None, *, captured: bool = False
    ) -> Any | None:
        """Create a context without device memory."""
        del options, captured
        return engine.create_execution_context_without_device_memory()

    def give_memory(self, context: Any, address: int, num_bytes: int) -> None:
        """Set the address only; 8.6 does not check the size."""
        del num_bytes
        context.device_memory = address

    def read_weights(self, engine: Any, onnx_file: str) -> bool:
        """Return False: 8.6 has no stripped engines."""
        del engine, onnx_file
        return False
