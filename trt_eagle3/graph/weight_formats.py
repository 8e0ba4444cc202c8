"""The registry of weight formats. ``dense`` is not listed: its numbers are the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_eagle3.checkpoint.quantised.weight import QuantisedRef
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.errors import UserError
from trt_eagle3.graph.formats.awq import AwqFormat
from trt_eagle3.graph.formats.format import WeightFormat
from trt_eagle3.graph.formats.fp8 import Fp8Format
from trt_eagle3.graph.formats.gptq import GptqFormat
from trt_eagle3.graph.formats.int8 import Int8Format
from trt_eagle3.graph.formats.nvfp4 import Nvfp4Format
from trt_eagle3.graph.formats.pack_quantized import PackQuantizedFormat

__all__ = ["WEIGHT_FORMATS", "format_of"]

WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "awq": AwqFormat(4),
    "fp8": Fp8Format(),
    "gptq": GptqFormat(4, less_one=True),
    "gptq_v2": GptqFormat(4, less_one=False),
    "int4_packed": PackQuantizedFormat(4),
    "int8": Int8Format(8),
    "int8_packed": PackQuantizedFormat(8),
    "nvfp4": Nvfp4Format(divides=False),
    "nvfp4_divided": Nvfp4Format(divides=True),
}
"""Name of a layout (``checkpoint.quantised.layout.LAYOUTS``) -> its format."""


def format_of(refs: Sequence[TensorRef]) -> str:
    """Return the name of the format that all of ``refs`` are stored in.

    Raises:
        UserError: one has no known format, or another than the first.
    """
    names = [_format_of(ref) for ref in refs]
    other = next((ref for ref, name in zip(refs, names, strict=True) if name != names[0]), None)
    if other is not None:
        raise UserError(
            f"{other.file.name}: {other.name}: expected weight format {names[0]} as "
            f"{refs[0].name}, since they share a product, got {_format_of(other)}. Quantise both "
            "alike."
        )
    return names[0]


def _format_of(ref: TensorRef) -> str:
    if isinstance(ref, QuantisedRef):
        return ref.format
    if ref.dtype not in FLOAT_DTYPES:
        raise UserError(
            f"{ref.file.name}: {ref.name}: expected a float32, float16 or bfloat16 tensor, got "
            f"{ref.dtype}. Use the unquantised checkpoint."
        )
    return "dense"
