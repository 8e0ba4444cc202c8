"""Write safetensors as a stream: tensors are copied from their places, one at a time."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trt_eagle3.atomic_io import atomic_file
from trt_eagle3.checkpoint.tensor_index import TensorRef
from trt_eagle3.dtype import dtype_named, dtype_of_safetensors, dtype_of_torch
from trt_eagle3.errors import UserError, clip
from trt_eagle3.io.bounded_read import open_regular

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Content",
    "array_content",
    "cached_file",
    "read_integers",
    "ref_content",
    "tensor_content",
    "write_tensors",
]

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Content:
    """A tensor to be written.

    Attributes:
        dtype: safetensors name of its type.
        chunks: reads its bytes lazily.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes]]


def ref_content(ref: TensorRef) -> Content:
    """Create the content of a tensor on disk. The file is open only while a chunk is read."""

    def chunks() -> Iterator[bytes]:
        end = ref.offset + ref.num_bytes
        for start in range(ref.offset, end, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, end - start)
            with open_regular(ref.file) as stream:
                stream.seek(start)
                part = stream.read(size)
            if len(part) < size:
                raise UserError(f"{ref.file}: {clip(ref.name)} is cut short. Download it again.")
            yield part

    return Content(ref.dtype, ref.shape, chunks)


def array_content(array: NDArray[Any]) -> Content:
    """Create the content of a NumPy array."""
    contiguous = np.ascontiguousarray(array)
    dtype = dtype_named(str(array.dtype)).safetensors
    return Content(dtype, tuple(array.shape), lambda: [contiguous.tobytes()])


def tensor_content(tensor: Tensor) -> Content:
    """Create the content of a torch tensor."""
    import torch

    def chunks() -> Iterator[bytes]:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES].numpy().tobytes()

    dtype = dtype_of_torch(tensor.dtype).safetensors
    return Content(dtype, tuple(tensor.shape), chunks)


def write_tensors(file: Path, contents: Mapping[str, Content]) -> None:
    """Write ``contents`` to ``file``, atomically and durably.

    The widest types come first, so that all are aligned.

    Raises:
        UserError: the file cannot be written.
    """
    dtypes = {name: dtype_of_safetensors(content.dtype) for name, content in contents.items()}
    ordered = sorted(contents.items(), key=lambda item: (-dtypes[item[0]].bits, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, content in ordered:
        start, end = end, end + dtypes[name].num_bytes(prod(content.shape))
        header[name] = {
            "dtype": content.dtype,
            "shape": list(content.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with atomic_file(file) as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for _, content in ordered:
                stream.writelines(content.chunks())
    except OSError as error:
        raise UserError(
            f"{file}: cannot write it: {error.strerror}. Free some space or name another place."
        ) from error


def cached_file(sources: Iterable[Path], name: str, cache: Path | None) -> Path:
    """Return the place of a file derived from ``sources``. It changes if one of them changes.

    Args:
        cache: the folder for derived files; by default ``trt-eagle3`` in the user's cache.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trt-eagle3"
    stats = [(source.resolve(), source.stat()) for source in sources]
    key = "\0".join(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}" for path, stat in stats)
    return root / hashlib.sha256(key.encode()).hexdigest()[:16] / name


def read_integers(ref: TensorRef) -> NDArray[np.int64]:
    """Read an int64, int32, uint8 or bool tensor as int64."""
    kinds = {"I64": "<i8", "I32": "<i4", "BOOL": "|u1", "U8": "|u1"}
    if ref.dtype not in kinds:
        raise UserError(f"{ref.file}: {clip(ref.name)}: expected whole numbers, got {ref.dtype}")
    raw = b"".join(ref_content(ref).chunks())
    return np.frombuffer(raw, dtype=kinds[ref.dtype]).astype(np.int64)
