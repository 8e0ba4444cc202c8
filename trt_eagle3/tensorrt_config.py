"""TensorRTConfig: how TensorRT builds engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from trt_eagle3.config_section import PositiveInt, Section, UserPath

__all__ = ["RUNTIMES", "Chip", "TensorRTConfig", "TensorRTRuntime", "chips_without_fp8"]

Chip = Literal["sm80", "sm86", "sm89", "sm120", "sm121"]
"""GPU architectures that TensorRT for RTX builds for and our kernels run on."""
_FIRST_WITH_FP8 = 89
_PLUGIN_WEIGHTS = ("fp8", "int8", "int4")  # of ``LinearFp8``, ``LinearInt8``, ``LinearInt4``


@dataclass(frozen=True)
class TensorRTRuntime:
    """A value of ``engine.tensorrt.runtime``.

    Attributes:
        label: its name for users.
        weights: values of ``engine.weights`` that its own products multiply as stored.
    """

    label: str
    weights: tuple[str, ...] = ()


RUNTIMES: Mapping[str, TensorRTRuntime] = {
    "tensorrt": TensorRTRuntime("TensorRT"),
    "rtx": TensorRTRuntime("TensorRT for RTX", ("int4", "int8", "fp8")),
}


def chips_without_fp8(chips: Iterable[str]) -> list[str]:
    """Return those of the GPU architectures ``chips`` (``sm86``) that do not multiply FP8."""
    return [chip for chip in chips if int(chip.removeprefix("sm")) < _FIRST_WITH_FP8]


class TensorRTConfig(Section):
    """How TensorRT builds engines.

    Attributes:
        runtime: ``tensorrt``, or ``rtx`` for TensorRT for RTX, which builds without a GPU.
        chips: GPU architectures of the engines; only for ``rtx``. Left out: this machine's.
        optimization_level: 0 to 5, how long the builder searches. Left out: TensorRT's default, on
            8.6 it is 2.
        workspace_mib: most device memory of a layer's algorithm. Left out: no limit.
        refit: build engines whose weights can be exchanged. strip_weights: build engines without
            weights, which are loaded from the ONNX graph next to them (TensorRT 10 and later).
        linear: what computes matrix products without a bias. ``auto``, for a 16-bit weight: our
            plugin on 8.6, whose own products need layout copies, and TensorRT on later versions.
            ``auto``, for a quantised weight: our plugin, but TensorRT for ``rtx``. ``tensorrt``:
            quantised weights are dequantised at build, except for ``rtx``.
        plugin_library: path of the plugin library. Left out: it is searched for.
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
                "chips: TensorRT builds only for this machine's GPU. Leave chips out, or build "
                "with runtime: rtx"
            )
        if len(set(self.chips)) < len(self.chips):
            raise ValueError(f"chips: expected each once, got {', '.join(self.chips)}")
        return self

    def packs_by_plugin(self, dtype: str) -> bool:
        """Return whether our plugins compute products with quantised weights. They do if ``linear``
        is ``plugin``, or if it is ``auto`` and the runtime has no such products.
        """
        if dtype == "float32":
            return False
        own = RUNTIMES[self.runtime].weights
        return self.linear == "plugin" or (self.linear == "auto" and not own)

    def held_weights(self, dtype: str) -> tuple[str, ...]:
        """Return the values of ``engine.weights`` that engines in ``dtype`` hold as stored."""
        return _PLUGIN_WEIGHTS if self.packs_by_plugin(dtype) else RUNTIMES[self.runtime].weights

    def check_weights(self, weights: str | None, dtype: str) -> None:
        """Refuse ``engine.weights`` that engines in ``dtype`` cannot hold.

        Raises:
            ValueError: engines cannot hold them; the message names those they can.
        """
        held, label = self.held_weights(dtype), RUNTIMES[self.runtime].label
        if weights not in {None, *held} and not held:
            raise ValueError(
                f"weights: engines of {label} hold none quantised in float32 or with "
                f"tensorrt.linear: tensorrt, got {weights}. Leave one of them out."
            )
        if weights not in {None, *held}:
            raise ValueError(
                f"weights: engines of {label} hold {' or '.join(held)}, got "
                f"{weights}. Leave it out, or use one of these."
            )
        without = chips_without_fp8(self.chips)
        if weights == "fp8" and without and not self.packs_by_plugin(dtype):
            raise ValueError(
                f"weights: fp8 and tensorrt.chips: {without[0]} has no FP8. Leave the chip out, "
                "use int4 or int8, or tensorrt.linear: plugin."
            )
