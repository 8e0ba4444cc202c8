"""SharedArena: memory that two processes see, without a name: when both are gone, however they
ended, so is it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedArena"]


class SharedArena:
    """A file without a name that grows as it is needed, and is mapped in pieces from its beginning.

    It is used again and again, because the first touch of a page costs more than all that is done
    with it. It does not count against ``/dev/shm``, which containers keep small, and it cannot
    shrink: a process that went wrong cannot take pages from under the other one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of another process's arena, which is closed with this one; None: a new
        one.
        """
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._pages: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return os.fstat(self.descriptor).st_size

    def array(self, shape: Sequence[int]) -> NDArray[np.uint8]:
        """uint8 ``shape`` at its beginning; what other arrays of it hold is lost when this one
        is written.
        """
        size = int(np.prod(shape))
        if size > self.num_bytes:
            os.ftruncate(self.descriptor, size)
        if size > len(self._pages):
            self._pages = np.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=np.uint8)
        return self._pages[:size].reshape(shape)

    def close(self) -> None:
        """Let go of it; arrays stay valid as long as somebody holds them."""
        self._pages = np.empty(0, dtype=np.uint8)
        os.close(self.descriptor)


def _new_file() -> int:
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    descriptor = os.memfd_create("trt-eagle3-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor
