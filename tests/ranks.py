"""The ranks of a parallel engine as threads of the test process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from trt_eagle3.decode.parallel.commands import Close
from trt_eagle3.decode.parallel.follower import Follower
from trt_eagle3.decode.parallel.leader import Leader, Ranks
from trt_eagle3.engine.runtime.collectives import Collectives
from trt_eagle3.errors import RankFailedError
from trt_eagle3.sharding import Shard

__all__ = ["ThreadCollectives", "ThreadRanks", "on_each_rank"]

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


class ThreadRanks(Ranks):
    """The ranks of an engine: followers that are threads."""

    def __init__(self, size: int) -> None:
        super().__init__(size, "cpu")
        self.commands: list[object] = []

    def _start(self) -> Leader:
        barrier, shared = threading.Barrier(self.size, timeout=60), [torch.empty(0)] * self.size
        collectives = [
            ThreadCollectives(Shard(rank, self.size), barrier, shared) for rank in range(self.size)
        ]
        return Leader(_ThreadLinks(collectives[1:], self.commands), collectives[0])


class _ThreadLinks:
    """Queues to the threads; implements ``Links``."""

    def __init__(self, followers: list[ThreadCollectives], sent: list[object]) -> None:
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._queues: list[queue.SimpleQueue[object]] = []
        self._threads = []
        self._sent = sent
        for collectives in followers:
            commands: queue.SimpleQueue[object] = queue.SimpleQueue()
            follower = Follower(collectives, commands.get, self._answers.put)
            thread = threading.Thread(target=self._run, args=(follower, collectives), daemon=True)
            self._queues.append(commands)
            self._threads.append(thread)
            thread.start()

    def _run(self, follower: Follower, collectives: ThreadCollectives) -> None:
        try:
            follower.run()
        except BaseException as error:
            self._answers.put(error)
            collectives.abort()

    def send(self, command: object) -> None:
        self._sent.append(command)
        for commands in self._queues:
            commands.put(command)

    def wait(self) -> None:
        for _ in self._queues:
            answer = self._answers.get(timeout=60)
            if isinstance(answer, BaseException):
                raise answer

    def check(self) -> None:
        pass

    def lost(self, reason: str) -> RankFailedError:
        while not self._answers.empty():
            answer = self._answers.get()
            reason = f"{reason}; {answer!r}"
        return RankFailedError(reason)

    def on_failure(self, call: Callable[[RankFailedError], object]) -> None:
        pass

    def close(self) -> None:
        self.send(Close())
        for thread in self._threads:
            thread.join(10)
