"""TensorRT 11: the same as 10, without the names that 10 replaced."""

from __future__ import annotations

from typing import Any

from trt_eagle3.engine.trt.dialects.v10 import TensorRT10

__all__ = ["TensorRT11"]


class TensorRT11(TensorRT10):
    """TensorRT 11; all its networks are strongly typed."""

    def device_bytes(self, engine: Any) -> int:
        """Return ``device_memory_size_v2``: the older name was removed."""
        return int(engine.device_memory_size_v2)

    def give_memory(self, context: Any, address: int, num_bytes: int) -> None:
        """Set address and size."""
        context.set_device_memory(address, num_bytes)
