"""TensorRTConfig: how TensorRT builds engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trt_eagle3.config_section import PositiveInt, Section, UserPath

__all__ = ["Chip", "TensorRTConfig"]

Chip = Literal["sm80", "sm86", "sm89", "sm120", "sm121"]
"""GPU architectures that TensorRT for RTX builds for and our kernels run on."""


class TensorRTConfig(Section):
    """How TensorRT builds engines.

    Attributes:
        runtime: ``tensorrt``, or ``rtx`` for TensorRT for RTX, which builds without a GPU.
        chips: the GPU architectures that engines are for; for ``rtx`` alone. Left out: this
            machine's.
        optimization_level: 0 to 5, how long the builder searches. Left out: TensorRT's default, on
            8.6 it is 2.
        workspace_mib: most device memory that a layer's algorithm may take. Left out: all there is.
        refit: engines whose weights can be exchanged. strip_weights: engines without weights, which
            are put in at load from the ONNX graph beside them (TensorRT 10 and later).
        linear: what computes matrix products without a bias. auto: of a 16-bit weight our plugin on
            8.6, whose own products stand between layout copies, TensorRT on later versions; of a
            quantised one our plugin, for ``rtx`` TensorRT. With ``tensorrt`` quantised weights
            are dequantised at build, but for ``rtx``.
        plugin_library: the plugin library, instead of the one that is found.
    """

    runtime: Literal["tensorrt", "rtx"] = "tensorrt"
    chips: tuple[Chip, ...] = ()
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    workspace_mib: PositiveInt | None = None
    refit: bool = False
    strip_weights: bool = False
    linear: Literal["auto", "plugin", "tensorrt"] = "auto"
    plugin_library: UserPath | None = None

    @model_validator(mode="after")
    def _chips_are_named_ahead(self) -> TensorRTConfig:
        if self.chips and self.runtime != "rtx":
            raise ValueError(
                "chips: TensorRT builds for the GPU that is there. Leave chips out, or build with "
                "runtime: rtx"
            )
        if len(set(self.chips)) < len(self.chips):
            raise ValueError(f"chips: each once, got {', '.join(self.chips)}")
        return self
