"""Exchanges by copies between the buffers of ranks, with buffers of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from trt_eagle3.engine.runtime import collectives
from trt_eagle3.engine.runtime.collectives import PeerMemory
from trt_eagle3.sharding import Shard

SIZE = 4
NUM_BYTES = 1 << 12


class _Peers:
    """Buffers of threads, in place of those of GPUs."""

    def __init__(self, buffers: Sequence[Tensor], barrier: threading.Barrier) -> None:
        self._buffers, self._wait = buffers, barrier.wait

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._buffers[rank][:num_bytes].view(dtype).view(shape)

    def barrier(self, channel: int) -> None:
        del channel
        self._wait()


def on_ranks(work: Callable[[PeerMemory], Tensor]) -> list[Tensor]:
    buffers = [torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(SIZE)]
    barrier = threading.Barrier(SIZE, timeout=30)

    def run(rank: int) -> Tensor:
        ours = object.__new__(PeerMemory)
        ours.shard, ours.device = Shard(rank, SIZE), torch.device("cpu")
        ours._buffer, ours._peers = buffers[rank], _Peers(buffers, barrier)
        return work(ours)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, range(SIZE)))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows need several turns."""
    monkeypatch.setattr(collectives, "_BUFFER_BYTES", NUM_BYTES)


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (60, 10), (500, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_columns_are_those_of_all_ranks_in_order(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    parts = torch.randn(SIZE, *shape).to(dtype)
    for _ in range(2):  # buffers that were written before
        rows = on_ranks(lambda ours: ours.all_gather(parts[ours.shard.rank]))
        assert all(torch.equal(found, torch.cat(list(parts), dim=1)) for found in rows)


def test_broadcast_copies_the_bytes_of_rank_0() -> None:
    sent = torch.randint(0, 256, (3 * NUM_BYTES + 5,), dtype=torch.uint8)

    def work(ours: PeerMemory) -> Tensor:
        data = sent.clone() if ours.shard.rank == 0 else torch.zeros_like(sent)
        ours.broadcast(data)
        return data

    assert all(torch.equal(found, sent) for found in on_ranks(work))
