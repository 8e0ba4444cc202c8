"""Why a target's logits are not finite numbers: a weight of its checkpoint, or what it computes
of them.
"""

from __future__ import annotations

from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.errors import EngineFailedError
from trt_eagle3.parity.reference.dequantise import read_values

__all__ = ["explain_overflow"]

_WIDER = {"float16": "engine.residual: float32, or engine.dtype: bfloat16 or float32"}


def explain_overflow(spec: TargetCheckpoint, dtype: str) -> EngineFailedError:
    """The error to end with; reads every weight of the checkpoint, unless one of them is the
    reason.
    """
    for ref in spec.tensors.values():
        if not read_values(ref).isfinite().all():
            return EngineFailedError(
                f"{ref.file}: {ref.name}: holds values that are not finite numbers, so the target "
                "has no answer. Get the checkpoint again, and rebuild."
            )
    return EngineFailedError(
        f"the target's logits are not finite numbers, though every weight of {spec.path} is: its "
        f"activations overflow in {dtype}. Rebuild with "
        f"{_WIDER.get(dtype, 'engine.dtype: float32')}; if that does not help, report it."
    )
