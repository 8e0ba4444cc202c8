"""Ranks on two GPUs: their sums alone, their tokens, and how they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.decode.parallel.test_modes import answers, built
from tests.decode.parallel.test_processes import pids
from trt_eagle3.decode.llm import LLM
from trt_eagle3.engine.runtime.collectives import PeerMemory, open_collectives
from trt_eagle3.errors import ClosedError, RankFailedError
from trt_eagle3.sharding import Shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices"),
]

SIZES = [(1, 8), (3, 5120), (64, 5120), (600, 4096), (5000, 5120)]


def exchange(rank: int, folder: str, failures: multiprocessing.SimpleQueue[str]) -> None:
    """Compare every exchange with its definition; puts the names of those that differ."""
    torch.cuda.set_device(rank)
    ours = open_collectives(Shard(rank, 2), Path(folder), "cuda")
    assert isinstance(ours, PeerMemory)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SIZES:
            parts = [drawn(shape, dtype, seed) for seed in range(2)]
            total = parts[0] + parts[1]
            ways: dict[str, Callable[[Tensor], Tensor]] = {"any": ours.all_reduce}
            if total.nbytes < 2 << 20:
                ways["one-shot"] = ours.one_shot
            if 64 << 10 < total.nbytes < 32 << 20:
                ways["two-shot"] = ours.two_shot
            for name, way in ways.items():
                for made in (way(parts[rank]), replayed(partial(way, parts[rank]))):
                    if not torch.equal(made, total):
                        found.append(f"{name} {dtype} {shape}")
            if not torch.equal(ours.all_gather(parts[rank]), torch.cat(parts, dim=1)):
                found.append(f"gather {dtype} {shape}")
    data = torch.arange(1 << 20, device="cuda").byte() * (rank == 0)
    ours.broadcast(data)
    if not torch.equal(data, torch.arange(1 << 20, device="cuda").byte()):
        found.append("broadcast")
    torch.cuda.synchronize()
    failures.put(", ".join(found))
    time.sleep(2)  # the other rank may still read this one's memory
    os._exit(0)


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def replayed(work: Callable[[], Tensor]) -> Tensor:
    """The result of ``work`` in a CUDA graph that runs twice."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    graph.replay()
    graph.replay()
    return found.clone()


def test_every_exchange_is_right_in_graphs_too(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    ranks = [
        context.Process(target=exchange, args=(rank, str(tmp_path), failures), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    assert [failures.get() for _ in ranks] == ["", ""]


@pytest.mark.parametrize("mode", ["chain", "block", "experts", "recurrent"])
def test_two_gpus_emit_the_tokens_of_one(mode: str, tmp_path: Path) -> None:
    bundle = built(tmp_path, mode, device="cuda")
    with LLM(bundle) as llm:
        llm.capture_graphs(2)
        expected = [answers(llm, images=mode == "chain") for _ in range(2)]
    with LLM(bundle, tensor_parallel=2) as llm:
        llm.capture_graphs(2)
        assert [answers(llm, images=mode == "chain") for _ in range(2)] == expected


def ask_for_ever(llm: LLM) -> None:
    while True:
        llm.generate("How are you?", max_tokens=40, ignore_eos=True)


def lose(bundle: Path, sent: signal.Signals, seconds: multiprocessing.SimpleQueue[float]) -> None:
    """Send a signal to the other rank, and measure until the engine has ended."""
    llm = LLM(bundle, tensor_parallel=2)
    llm.generate("How are you?", max_tokens=4)
    (pid,) = pids(llm)
    threading.Timer(0.2, os.kill, (pid, sent)).start()
    start = time.monotonic()
    try:
        ask_for_ever(llm)
    except (RankFailedError, ClosedError):
        seconds.put(time.monotonic() - start if not llm.ready else 1e9)
    os._exit(0)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_that_ends_or_hangs_ends_the_engine(sent: signal.Signals, tmp_path: Path) -> None:
    bundle = built(tmp_path, "chain", device="cuda")
    context = multiprocessing.get_context("spawn")
    seconds = context.SimpleQueue()
    process = context.Process(target=lose, args=(bundle, sent, seconds), daemon=True)
    process.start()
    process.join(90)
    assert process.exitcode == 0
    assert not seconds.empty()
    assert seconds.get() < 15
