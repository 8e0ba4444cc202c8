"""Drop the zero biases that AutoGPTQ writes beside quantised weights without a bias."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.io.bounded_read import open_regular

__all__ = ["without_zero_biases"]


def without_zero_biases(
    tensors: Mapping[str, TensorRef], expected: Collection[str]
) -> dict[str, TensorRef]:
    """Return ``tensors`` without biases that are zero and not ``expected``.

    Only biases of quantised weights are read. vLLM skips them too, whatever their values.
    """
    return {
        name: ref
        for name, ref in tensors.items()
        if name in expected or not _is_zero_bias(name, ref, tensors)
    }


def _is_zero_bias(name: str, ref: TensorRef, tensors: Mapping[str, TensorRef]) -> bool:
    module, _, last = name.rpartition(".")
    if last != "bias" or not isinstance(tensors.get(f"{module}.weight"), QuantisedRef):
        return False
    with open_regular(ref.file) as stream:
        stream.seek(ref.offset)
        return not stream.read(ref.num_bytes).strip(b"\0")
