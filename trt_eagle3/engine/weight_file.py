"""Weights written in the type that an engine computes in, a few megabytes at a time; refused
where they do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.checkpoint.tensor_file import Content, write_tensors
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.dtype import DType, dtype_of_onnx, dtype_of_safetensors
from trt_eagle3.errors import UserError
from trt_eagle3.graph.trt_export import TrtExport

__all__ = ["converted_content", "write_tables", "write_weights"]

_CHUNK_BYTES = 1 << 23


def write_weights(ready: TrtExport, root: Path, file: Path) -> None:
    """Write the weights of ``ready``, read from their files under ``root``, as its model refers to
    them.

    Raises:
        UserError: a value that the type written cannot hold, named with its tensor; a file cut
            short.
    """
    with atomic_file(file) as stream:
        for weight in ready.weights:
            stream.seek(ready.offsets[weight.name])
            for part in weight.parts:
                source = _Source(
                    part.name,
                    root / part.location,
                    part.offset,
                    part.num_bytes,
                    dtype_of_onnx(part.dtype).torch,
                )
                stream.writelines(
                    map(_raw, source.converted(dtype_of_onnx(weight.dtype).torch, part.scale))
                )


def converted_content(ref: TensorRef, dtype: DType) -> Content:
    """The tensor at ``ref`` as one of ``dtype``, for ``write_tensors``; whole numbers and bools
    as they are.
    """
    if ref.dtype not in FLOAT_DTYPES:
        source = _Source(ref.name, ref.file, ref.offset, ref.num_bytes, torch.uint8)
        return Content(ref.dtype, ref.shape, lambda: map(bytes, source.chunks()))
    floats = _Source(
        ref.name, ref.file, ref.offset, ref.num_bytes, dtype_of_safetensors(ref.dtype).torch
    )
    return Content(dtype.safetensors, ref.shape, lambda: map(_raw, floats.converted(dtype.torch)))


def write_tables(file: Path, tables: Mapping[str, TensorRef], dtype: DType) -> None:
    """Write what a bundle reads outside its engines (token tables, vocabulary maps) as a
    safetensors file.
    """
    write_tensors(file, {name: converted_content(ref, dtype) for name, ref in tables.items()})


class _Source:
    """A run of values on disk."""

    def __init__(
        self, name: str, file: Path, offset: int, num_bytes: int, dtype: torch.dtype
    ) -> None:
        self._name = name
        self._file = file
        self._offset = offset
        self._num_bytes = num_bytes
        self._dtype = dtype

    def chunks(self) -> Iterator[bytearray]:
        """What is stored."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                left = self._num_bytes
                while left:
                    chunk = bytearray(min(left, _CHUNK_BYTES))
                    if stream.readinto(chunk) != len(chunk):
                        raise UserError(
                            f"{self._file}: {self._name} is cut short. Download it again."
                        )
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise UserError(f"{self._file}: cannot read {self._name}: {error.strerror}.") from error

    def converted(self, dtype: torch.dtype, scale: float = 1.0) -> Iterator[Tensor]:
        """The values as ``dtype``, times ``scale``."""
        for chunk in self.chunks():
            values = torch.frombuffer(chunk, dtype=self._dtype)
            made = values.to(dtype) if scale == 1.0 else (values.float() * scale).to(dtype)
            self._check(values, made)
            yield made

    def _check(self, values: Tensor, made: Tensor) -> None:
        if bool(torch.isfinite(made).all()):
            return
        worst = float(values[~torch.isfinite(made)][0])
        name = str(made.dtype).removeprefix("torch.")
        fix = (
            f"{name} ends at {torch.finfo(made.dtype).max:g}. Build with engine.dtype: bfloat16 or "
            "float32."
            if abs(worst) < float("inf")
            else "The checkpoint is damaged. Download it again."
        )
        raise UserError(
            f"{self._file}: {self._name} holds {worst:g}, which is no {name} value: {fix}"
        )


def _raw(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()
