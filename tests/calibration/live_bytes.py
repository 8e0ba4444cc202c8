"""Bytes of tensors that are alive while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts each storage that an operation makes, until it is let go; what is mapped from a file
    is not counted. ``peak``: the most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "set_" not in str(func):
            for storage in _storages(found):
                self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._live.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        self._now += storage.nbytes() - (0 if known is None else known[1])
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._now > self.peak:
            for key in [k for k, (ref, _) in self._live.items() if ref.expired()]:
                self._now -= self._live.pop(key)[1]
            self.peak = max(self.peak, self._now)


def _storages(found: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(found):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
            yield leaf.untyped_storage()
