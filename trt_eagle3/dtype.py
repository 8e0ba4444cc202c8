"""The table of element types, with their names in ONNX, safetensors, torch and TensorRT.

It is the only such table. Importing it imports neither torch nor onnx.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trt_eagle3.errors import UserError, quote

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMPUTE_DTYPES",
    "DTYPES",
    "LARGEST_FP8",
    "DType",
    "dtype_named",
    "dtype_of_onnx",
    "dtype_of_safetensors",
    "dtype_of_tensorrt",
    "dtype_of_torch",
]

LARGEST_FP8 = 448.0
"""The largest number of e4m3."""


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: torch's and NumPy's (``bfloat16``).
        onnx: the enum of ``onnx.TensorProto``.
        safetensors: the spelling of a safetensors header (``BF16``).
        bits: of one element.
        tensorrt: the member of ``tensorrt.DataType``; None where TensorRT has none.
    """

    name: str
    onnx: int
    safetensors: str
    bits: int
    tensorrt: str | None = None

    @property
    def torch(self) -> torch.dtype:
        """torch's type of this name.

        Raises:
            UserError: the installed torch has none.
        """
        import torch

        dtype: torch.dtype | None = getattr(torch, self.name, None)
        if dtype is None:
            raise UserError(f"torch {torch.__version__} has no type {self.name}. Use a later one.")
        return dtype

    def num_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` packed elements, rounded up to a whole byte."""
        return -(-count * self.bits // 8)

    def __str__(self) -> str:
        return self.name


DTYPES = (
    DType("float64", 11, "F64", 64),
    DType("float32", 1, "F32", 32, "FLOAT"),
    DType("float16", 10, "F16", 16, "HALF"),
    DType("bfloat16", 16, "BF16", 16, "BF16"),
    DType("float8_e4m3fn", 17, "F8_E4M3", 8, "FP8"),
    DType("float8_e5m2", 19, "F8_E5M2", 8),
    DType("float8_e8m0fnu", 24, "F8_E8M0", 8, "E8M0"),
    DType("int64", 7, "I64", 64, "INT64"),
    DType("int32", 6, "I32", 32, "INT32"),
    DType("int16", 5, "I16", 16),
    DType("int8", 3, "I8", 8, "INT8"),
    DType("uint64", 13, "U64", 64),
    DType("uint32", 12, "U32", 32),
    DType("uint16", 4, "U16", 16),
    DType("uint8", 2, "U8", 8, "UINT8"),
    DType("bool", 9, "BOOL", 8, "BOOL"),
)


def dtype_named(name: str) -> DType:
    """Look up a type by its name in torch (``bfloat16``).

    Raises:
        UserError: there is none.
    """
    return _found(_BY_NAME.get(name), name, _BY_NAME)


def dtype_of_onnx(enum: int) -> DType:
    """Look up a type by its enum in ``onnx.TensorProto``.

    Raises:
        UserError: there is none.
    """
    return _found(_BY_ONNX.get(enum), enum, map(str, _BY_ONNX))


def dtype_of_safetensors(spelling: str) -> DType:
    """Look up a type by its spelling in a safetensors header (``BF16``).

    Raises:
        UserError: there is none.
    """
    return _found(_BY_SAFETENSORS.get(spelling), spelling, _BY_SAFETENSORS)


def dtype_of_tensorrt(member: str) -> DType:
    """Look up a type by the name of its member of ``tensorrt.DataType`` (``HALF``).

    Raises:
        UserError: there is none.
    """
    return _found(_BY_TENSORRT.get(member), member, _BY_TENSORRT)


def dtype_of_torch(dtype: torch.dtype) -> DType:
    """Look up a type by torch's.

    Raises:
        UserError: there is none.
    """
    return dtype_named(str(dtype).removeprefix("torch."))


def _found(dtype: DType | None, given: object, known: Iterable[str]) -> DType:
    if dtype is None:
        raise UserError(f"expected an element type ({', '.join(known)}), got {quote(given)}")
    return dtype


_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_ONNX = {dtype.onnx: dtype for dtype in DTYPES}
_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}
_BY_TENSORRT = {dtype.tensorrt: dtype for dtype in DTYPES if dtype.tensorrt}
COMPUTE_DTYPES = tuple(map(dtype_named, ("float32", "float16", "bfloat16")))
"""What an engine may compute in, and what dense weights may be stored as."""
