"""The ranks of a parallel engine as threads of the test process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from trt_eagle3.engine.runtime.collectives import Collectives
from trt_eagle3.sharding import Shard

__all__ = ["ThreadCollectives", "on_each_rank"]

T = TypeVar("T")


class ThreadCollectives(Collectives):
    """Exchanges through a list that all threads share."""

    def __init__(self, shard: Shard, barrier: threading.Barrier, shared: list[Tensor]) -> None:
        super().__init__(shard, torch.device("cpu"))
        self._barrier, self._shared = barrier, shared
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return torch.stack([part.float() for part in self._exchanged(x)]).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchanged(x), dim=-1)

    def broadcast(self, data: Tensor) -> None:
        data.copy_(self._exchanged(data)[0])

    def abort(self) -> None:
        self._barrier.abort()

    def close(self) -> None:
        self._barrier.abort()

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        self._shared[self.shard.rank] = x
        self._barrier.wait()
        found = [part.clone() for part in self._shared]
        self._barrier.wait()
        return found


def on_each_rank(size: int, work: Callable[[ThreadCollectives], T]) -> list[T]:
    """Run ``work`` on every rank at once; return the results in the order of the ranks."""
    barrier, shared = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def run(rank: int) -> T:
        collectives = ThreadCollectives(Shard(rank, size), barrier, shared)
        try:
            return work(collectives)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
