"""Ranks as processes of this machine: what they emit, and how they end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import MIXTURE, build_tiny
from tests.waiting import wait_for
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.parallel.processes import Processes
from trt_eagle3.engine.runtime.collectives import check_devices
from trt_eagle3.errors import EnvironmentMissingError, RankFailedError, UserError

PROMPTS = ["What is 2 plus 3?", "Count from two to nine."]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(
        tmp_path_factory.mktemp("pair"),
        target=MIXTURE / "target",
        draft=MIXTURE / "draft",
        engine={"backend": "torch"},
        speculation={"mode": "tree", "steps": 3, "topk": 2, "num_draft_tokens": 7},
    )


def answers(llm: LLM) -> list[tuple[int, ...]]:
    asked = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    found = llm.generate(PROMPTS, **asked) + llm.generate(PROMPTS, temperature=1.0, seed=5, **asked)
    return [answer.token_ids for answer in found]


def pids(llm: LLM) -> list[int]:
    assert llm.bundle.ranks is not None
    links = llm.bundle.ranks.started().links
    assert isinstance(links, Processes)
    return [process.pid for process in links._processes]


def listening() -> Iterator[str]:
    """Addresses, as hexadecimal words, on which processes of this machine listen."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            yield local.partition(":")[0]


def test_four_processes_emit_the_tokens_of_one_and_end_with_a_dead_rank(bundle: Path) -> None:
    with LLM(bundle) as llm:
        expected = answers(llm)
    before = [*listening()]
    with LLM(bundle, tensor_parallel=4) as llm:
        assert answers(llm) == expected
        others = pids(llm)
    with LLM(bundle, tensor_parallel=4) as llm:  # by the same processes
        assert answers(llm) == expected
        assert pids(llm) == others
        with pytest.raises(UserError, match="runs an engine of several ranks already"):
            LLM(bundle, tensor_parallel=4).start()
        more = [*listening()]
        for address in before:
            if address in more:
                more.remove(address)
        assert set(more) <= {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
        os.kill(others[1], signal.SIGKILL)
        wait_for(lambda: not llm.ready)
        with pytest.raises(RankFailedError, match=r"rank 2: its process was ended by SIGKILL"):
            llm.bundle.ranks.started().links.check()  # type: ignore[union-attr]
    for pid in others:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(EnvironmentMissingError, match=r"2 needs as many GPUs, torch sees 1\."):
        check_devices(2, "cuda")


def test_number_of_devices_that_cannot_be_is_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match=r"expected 1, 2, 4 or 8, got 3"):
        LLM(bundle, tensor_parallel=3)


def test_backend_without_ranks_refuses_several_devices(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"2 is for backend: torch, got onnxruntime\."):
        LLM(build_tiny(tmp_path), tensor_parallel=2)
