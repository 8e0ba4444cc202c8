"""Write weights and tables as files, in the type that an engine computes in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.checkpoint.tensor_file import Content, ref_content, write_tensors
from trt_eagle3.checkpoint.tensor_index import FLOAT_DTYPES, TensorRef
from trt_eagle3.dtype import DType
from trt_eagle3.engine.runtime.weights import materialise, pieces
from trt_eagle3.graph.trt_export import TrtExport
from trt_eagle3.graph.weights import WeightExpr, part_of

__all__ = ["converted_content", "write_tables", "write_weights"]


def write_weights(ready: TrtExport, root: Path, file: Path) -> None:
    """Write the weights of ``ready``, read from files under ``root``, at the offsets of its model.

    Raises:
        UserError: the type written cannot hold a value (the message names its tensor), or a file is
            cut short.
    """
    with atomic_file(file) as stream:
        for name, expr in ready.weights.items():
            stream.seek(ready.offsets[name])
            stream.writelines(map(_raw, _in_order(expr, root)))


def converted_content(ref: TensorRef, dtype: DType) -> Content:
    """Return the tensor at ``ref`` as content of type ``dtype``, for ``write_tensors``. Integers
    and bools keep their type.
    """
    if ref.dtype not in FLOAT_DTYPES:
        return ref_content(ref)
    expr = WeightExpr((part_of(ref, lambda r: r.file.name),), dtype)

    def chunks() -> Iterable[bytes]:
        return map(_raw, _in_order(expr, ref.file.parent))

    return Content(dtype.safetensors, ref.shape, chunks)


def write_tables(file: Path, tables: Mapping[str, TensorRef], dtype: DType) -> None:
    """Write the tensors that a bundle reads outside its engines (token tables, vocabulary maps) as
    a safetensors file.
    """
    write_tensors(file, {name: converted_content(ref, dtype) for name, ref in tables.items()})


def _in_order(expr: WeightExpr, root: Path) -> Iterator[Tensor]:
    """Yield values in row-major order. A weight with a transposed part is made whole first."""
    if any(part.transpose for part in expr.parts):
        yield materialise(expr, root, expr.dtype)
    else:
        yield from (values for _, values in pieces(expr, root, expr.dtype))


def _raw(values: Tensor) -> bytes:
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()
