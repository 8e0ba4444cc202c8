"""SharedArena: anonymous memory that two processes share.

The kernel frees it when both processes have ended, in whatever way.
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
    """An unnamed file that grows on demand and is mapped from its beginning.

    It is reused, because the first access to a page takes longer than all work on it. It does not
    count against ``/dev/shm``, which is small in containers. It cannot shrink, so a faulty process
    cannot remove pages that the other process uses.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """``descriptor``: of another process's arena, closed with this object; None: create one."""
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._pages: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Current size in bytes."""
        return os.fstat(self.descriptor).st_size

    def array(self, shape: Sequence[int]) -> NDArray[np.uint8]:
        """Return a uint8 array of ``shape`` at the beginning of the memory.

        Writing to it overwrites the other arrays of this arena.
        """
        size = int(np.prod(shape))
        if size > self.num_bytes:
            os.ftruncate(self.descriptor, size)
        if size > len(self._pages):
            self._pages = np.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=np.uint8)
        return self._pages[:size].reshape(shape)

    def close(self) -> None:
        """Release the memory. Arrays stay valid while they are referenced."""
        self._pages = np.empty(0, dtype=np.uint8)
        os.close(self.descriptor)


def _new_file() -> int:
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    descriptor = os.memfd_create("trt-eagle3-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor
