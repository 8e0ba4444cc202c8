"""A lazy index over safetensors: where each tensor lies, with nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["TensorRef"]


@dataclass(frozen=True)
class TensorRef:
    """One tensor's place on disk.

    Attributes:
        name: the name in the file.
        file: the safetensors file.
        offset: first byte in the file (header included).
        num_bytes: length in bytes.
        dtype: safetensors spelling (``F32``, ``BF16``, ``F16``, ``I64``, ``BOOL``, ...).
        shape: row-major.
    """

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
