"""Exchanges between the ranks of a tensor-parallel engine, one process each.

All ranks call the same exchanges in the same order. Every sum adds the ranks' values in the order
of the ranks, so all ranks get the same bits, whatever the number of rows is.

On the CPU the values go through gloo. On CUDA each rank reads the others' memory over NVLink or
PCIe (``torch.distributed._symmetric_memory``); nothing waits for the host, so CUDA graphs capture
these exchanges like any launch. No multicast (NVLS) and no NCCL is used. There are two ways to sum,
each in one launch:

    one-shot  every rank reads all values of all ranks, and adds them
    two-shot  every rank adds its share of the values, and writes the sums to all ranks; it moves
              fewer bytes, and waits twice

The processes find each other through a file in a private folder. gloo listens on the loopback
interface only.

Shapes: n rows, W columns.
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trt_eagle3.errors import EngineFailedError, EnvironmentMissingError, UserError, clip
from trt_eagle3.sharding import Shard

__all__ = ["EXCHANGE_S", "Collectives", "PeerMemory", "check_devices", "open_collectives"]

EXCHANGE_S = 8.0
"""Seconds that an exchange may wait for another rank."""
_ABORT_S = 2.0
_JOIN_S: Mapping[str, float] = {"cpu": 60.0, "cuda": 8.0}
"""Seconds for all ranks to meet; all processes run by then. Torch holds Python's lock meanwhile on
CUDA, so no thread can report a dead rank.
"""
_BUFFER_BYTES = 64 << 20
_ONE_SHOT_BYTES = 512 << 10
"""Most bytes that a rank reads of the others in a one-shot sum. Two H200s need the same time for
both ways at about this size (docs/measurements.md, "Several GPUs").
"""
_SUMMED = (torch.bfloat16, torch.float32)  # types that torch's launches add
_WITHOUT_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


class Collectives(ABC):
    """The exchanges of one rank. ``shard``: which rank of how many. ``device``: of its tensors."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        self.shard = shard
        self.device = device

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x [n, W]`` over all ranks, in the type of ``x``."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the columns of ``x [n, W]`` of all ranks, side by side: ``[n, ranks * W]``."""

    @abstractmethod
    def broadcast(self, data: Tensor) -> None:
        """Copy the bytes ``data``, uint8 [n], of rank 0 into those of the other ranks."""

    @abstractmethod
    def abort(self) -> None:
        """Release launches that wait for a dead rank. Their results are arbitrary."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. No launch of this rank's may still run."""


def open_collectives(shard: Shard, folder: Path, device: str) -> Collectives:
    """Join the ranks that meet in ``folder``, a private folder of this machine.

    ``device``: ``cpu``, or ``cuda``: rank r uses the visible GPU r, which must be this thread's
    current one.

    Raises:
        EnvironmentMissingError: torch has no gloo, or a rank did not come.
        UserError: this process is in a process group already.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise EnvironmentMissingError(
            "tensor_parallel: this torch has no torch.distributed with gloo. Install another build."
        )
    if dist.is_initialized():
        raise UserError(
            "tensor_parallel: this process is in a torch.distributed group already, perhaps of "
            "another parallel engine. Close it, or use a process of its own."
        )
    os.environ.update(_WITHOUT_MULTICAST)
    store, join = dist.FileStore(str(folder / "ranks"), shard.size), _JOIN_S[device]
    store.set_timeout(timedelta(seconds=join))
    with _on_loopback():
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=join),
                group_name=folder.name,
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise EnvironmentMissingError(
                f"tensor_parallel: {shard.size} processes cannot meet: {reason}"
            ) from error
    if device == "cuda":
        try:
            return PeerMemory(shard, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:
            raise EnvironmentMissingError(
                "tensor_parallel: torch cannot share memory between these GPUs: "
                f"{clip(error)}. Serve one copy on each."
            ) from error
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=EXCHANGE_S))
    return _Gloo(shard, torch.device("cpu"))


def check_devices(size: int, device: str) -> None:
    """Check that this machine has GPUs for ``size`` ranks that can read each other's memory.

    Raises:
        EnvironmentMissingError: there are too few, they differ, or they cannot.
    """
    if device != "cuda":
        return
    count = torch.cuda.device_count()
    if count < size:
        raise EnvironmentMissingError(
            f"tensor_parallel: {size} needs as many GPUs, torch sees {count}. Lower it."
        )
    names = [torch.cuda.get_device_name(i) for i in range(size)]
    if len(set(names)) > 1:
        raise EnvironmentMissingError(
            f"tensor_parallel: expected GPUs of one kind, got {', '.join(names)}. "
            "Choose them with CUDA_VISIBLE_DEVICES."
        )
    pairs = ((i, j) for i in range(size) for j in range(size) if i != j)
    for one, other in pairs:
        if not torch.cuda.can_device_access_peer(one, other):
            raise EnvironmentMissingError(
                f"tensor_parallel: GPU {one} cannot read the memory of GPU {other}. Use GPUs that "
                "are linked, or serve one copy on each."
            )


class _Gloo(Collectives):
    """Exchanges of CPU tensors."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add the ranks' values in float32 or wider, in the order of the ranks."""
        first, *others = self._gathered(x)
        total = first if x.dtype == torch.float64 else first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement ``Collectives.all_gather``."""
        return torch.cat(self._gathered(x), dim=-1)

    def broadcast(self, data: Tensor) -> None:
        """Implement ``Collectives.broadcast``."""
        import torch.distributed as dist

        with _told():
            dist.broadcast(data, src=0)

    def abort(self) -> None:
        """Do nothing: gloo raises when the connection to a dead rank ends."""

    def close(self) -> None:
        """Implement ``Collectives.close``."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def _gathered(self, x: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        found = [torch.empty(x.shape, dtype=x.dtype) for _ in range(self.shard.size)]
        with _told():
            dist.all_gather(found, x.contiguous())
        return found


@contextmanager
def _told() -> Iterator[None]:
    """Reword gloo's errors, which name no rank."""
    try:
        yield
    except RuntimeError as error:
        late = "Timed out" in str(error)
        what = f"took no part for {EXCHANGE_S:g} s" if late else "has gone"
        raise EngineFailedError(f"in an exchange another rank {what}") from error


class PeerMemory(Collectives):
    """Exchanges of CUDA tensors through one buffer of each rank, which all ranks can read.

    A buffer is written again only after a barrier that follows all reads of it.
    """

    def __init__(self, shard: Shard, device: torch.device) -> None:
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory as symmetric

        super().__init__(shard, device)
        assert dist.group.WORLD is not None, "the group is initialised first"
        self._group = dist.group.WORLD.group_name
        self._buffer = symmetric.empty(_BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._peers: Any = symmetric.rendezvous(self._buffer, self._group)
        self._aborting = torch.cuda.Stream(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Implement ``Collectives.all_reduce``; bfloat16 values are added in their type."""
        if x.dtype not in _SUMMED:
            return self.all_reduce(x.float()).to(x.dtype)
        x = x.contiguous()
        if x.nbytes * (self.shard.size - 1) <= _ONE_SHOT_BYTES:
            return self.one_shot(x)
        most = max(_BUFFER_BYTES // (x.nbytes // len(x)), 1)
        sums = [self.two_shot(rows) for rows in x.split(most)]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def one_shot(self, x: Tensor) -> Tensor:
        """Sum by one launch that reads every rank's values."""
        symm_mem = torch.ops.symm_mem
        found: Tensor = symm_mem.one_shot_all_reduce_copy(self._own(x), x, "sum", self._group)
        return found

    def two_shot(self, x: Tensor) -> Tensor:
        """Sum by one launch in which each rank adds a share and writes it to all."""
        own = self._own(x)
        own.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._group)
        return own.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """Implement ``Collectives.all_gather``."""
        x = x.contiguous()
        most = max(_BUFFER_BYTES // (x.nbytes // max(len(x), 1)), 1)
        rows = [self._gather_rows(part) for part in x.split(most)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def broadcast(self, data: Tensor) -> None:
        """Implement ``Collectives.broadcast``."""
        for part in data.split(_BUFFER_BYTES):
            if self.shard.rank == 0:
                self._own(part).copy_(part)
            self._barrier()
            if self.shard.rank:
                part.copy_(self._peer(0, part.shape, part.dtype))
            self._barrier()

    def abort(self) -> None:
        """Signal every barrier from a second stream until the main one is idle, or for 2 s."""
        size, rank = self.shard.size, self.shard.rank
        done = torch.cuda.Event()
        done.record(torch.cuda.default_stream(self.device))
        end = time.monotonic() + _ABORT_S
        with torch.cuda.stream(self._aborting):
            while not done.query() and time.monotonic() < end:
                # a waiting launch takes a 1 from its own pad, and puts a 1 into another's 0
                for peer in range(size):
                    pad = self._peers.get_signal_pad(peer, dtype=torch.int32)
                    pad.fill_(int(peer == rank))
                self._aborting.synchronize()

    def close(self) -> None:
        """Implement ``Collectives.close``."""
        import torch.distributed as dist

        self._peers = None
        del self._buffer
        dist.destroy_process_group()

    def _gather_rows(self, x: Tensor) -> Tensor:
        self._own(x).copy_(x)
        self._barrier()
        ranks = range(self.shard.size)
        found = torch.cat([self._peer(rank, x.shape, x.dtype) for rank in ranks], dim=-1)
        self._barrier()
        return found

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's buffer in the type and shape of ``x``."""
        raw: Tensor = self._buffer[: x.nbytes]
        return raw.view(x.dtype).view(x.shape)

    def _peer(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found: Tensor = self._peers.get_buffer(rank, tuple(shape), dtype)
        return found

    def _barrier(self) -> None:
        self._peers.barrier(channel=0)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let gloo use the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if loopback is not None:
        os.environ[name] = loopback
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
