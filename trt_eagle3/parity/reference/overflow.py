"""Explain why a target's logits are not finite: a weight of its checkpoint, or its activations."""

from __future__ import annotations

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import EngineFailedError
from trt_eagle3.parity.reference.dequantise import read_values

__all__ = ["explain_overflow"]

_WIDER = {"float16": "engine.residual: float32, or engine.dtype: bfloat16 or float32"}


def explain_overflow(spec: TargetCheckpoint, dtype: str) -> EngineFailedError:
    """Return the error to raise.

    Reads the weights of the checkpoint up to the first that is not finite.
    """
    for ref in spec.tensors.values():
        if not read_values(ref).isfinite().all():
            return EngineFailedError(
                f"{ref.file}: {ref.name}: contains values that are not finite numbers, so the "
                "target has no answer. Download the checkpoint again, and rebuild."
            )
    return EngineFailedError(
        f"the target's logits are not finite numbers, although every weight of {spec.path} is: its "
        f"activations overflow in {dtype}. Rebuild with "
        f"{_WIDER.get(dtype, 'engine.dtype: float32')}; if that does not help, report it."
    )
