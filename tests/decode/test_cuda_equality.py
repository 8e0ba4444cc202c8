"""float32 on a GPU: whatever runs beside a request, its tokens are those that plain decoding says
alone on the CPU. In every mode, for 1 to 64 at once that come and go at random, with prompts that
begin alike, and where pages are so few that sequences are put off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.heldout import MAX_TOKENS, heldout, plain_answers, request_of
from tests.decode.test_batches import MODES as FIXED
from tests.tiny import build_tiny
from trt_eagle3 import LLM, Request, SamplingParams
from trt_eagle3.decode.loaded_bundle import LoadedBundle, open_graph_of
from trt_eagle3.decode.sampling.sampling_params import GREEDY
from trt_eagle3.engine.runtime.session import Capabilities, Reduction, Session
from trt_eagle3.spec import StateSpec

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "plain": {**FIXED["chain"], "adaptive": False},
    **{mode: {**values, "adaptive": False} for mode, values in FIXED.items()},
    "adaptive": {**FIXED["chain"], "adaptive": True},
}
ENGINE = {"backend": "torch", "device": "cuda", "dtype": "float32"}
BATCHES = (1, 8, 64)
LONG_SAMPLING = SamplingParams(ignore_eos=True)
ASKED = {1: 16, 8: 60, 64: 240}  # requests: of the last each question twice and more
FEW_ROWS = 640  # of the KV cache, where 64 sequences want some 8,000
LONG, NUM_LONG = (
    100,
    24,
)  # tokens that outgrow what a sequence is admitted with, of so many questions
PLAIN_SHARE = 0.2  # of the requests, which do not speculate among others that do


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    if ENGINE["device"] == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Of every held-out question, alone on the CPU."""
    return plain_answers(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def expected_long(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """Of some questions, alone on the CPU, end tokens ignored."""
    limits = {"max_batch_size": 1, "prefix_cache": False}
    with LLM(build_tiny(tmp_path_factory.mktemp("long"), limits=limits)) as engine:
        asked = (request_of(e, LONG_SAMPLING, speculation=False) for e in heldout()[:NUM_LONG])
        return [
            engine.submit(with_max_tokens(request, LONG)).finish().token_ids for request in asked
        ]


def with_max_tokens(request: Request, count: int) -> Request:
    return replace(request, sampling=request.sampling.updated(max_tokens=count))


def build(folder: Path, mode: str, batch_size: int, **limits: int) -> Path:
    sizes = {"max_batch_size": batch_size, "max_seq_len": 256, **limits}
    return build_tiny(folder, engine=ENGINE, limits=sizes, speculation=MODES[mode])


def different(
    engine: LLM,
    expected: Sequence[tuple[int, ...]],
    batch_size: int,
    *,
    mode: str,
    sampling: SamplingParams = GREEDY,
    longest: int = MAX_TOKENS,
) -> list[str]:
    """Ask questions at random, so many at once; those whose tokens are not the expected ones."""
    draw = random.Random(f"{mode}/{batch_size}")
    order = list(range(len(expected))) * 5
    draw.shuffle(order)
    jobs = iter(order[: ASKED[batch_size]])
    found: list[str] = []

    async def read() -> None:
        await asyncio.sleep(0.2 * draw.random())
        for index in jobs:
            count = draw.randrange(4, longest + 1)
            speculation = mode != "plain" and draw.random() > PLAIN_SHARE
            request = request_of(heldout()[index], sampling, speculation=speculation)
            answer = engine.submit(with_max_tokens(request, count))
            tokens = [token async for chunk in answer for token in chunk.token_ids]
            if tuple(tokens) != expected[index][:count]:
                found.append(f"{index}: {tokens}, expected {expected[index][:count]}")

    async def read_all() -> None:
        await asyncio.gather(*(read() for _ in range(batch_size)))

    asyncio.run(read_all())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_float32_tokens_are_those_of_plain_decoding_alone_at_any_batch_size(
    mode: str, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with LLM(build(tmp_path, mode, 64)) as engine:
        for batch_size in BATCHES:
            assert different(engine, expected, batch_size, mode=mode) == []
        now = engine.metrics()
    assert now.kv_pages_used == 0
    assert now.reused_tokens > 1000, "prompts that begin alike share pages"
    assert mode not in FIXED or (now.acceptance_length or 0) > 3


@pytest.mark.parametrize("mode", MODES)
def test_float32_tokens_of_sequences_that_were_put_off_are_those_of_plain_decoding(
    mode: str, expected_long: list[tuple[int, ...]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mode": mode, "sampling": LONG_SAMPLING, "longest": LONG}
    with LLM(build(tmp_path, mode, 64, max_kv_tokens=FEW_ROWS)) as engine:
        assert different(engine, expected_long, 64, **options) == []
        now = engine.metrics()
    assert now.preempted > 10
    assert now.kv_pages_used == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_page_of_a_neighbour_is_noticed(
    mode: str, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Planted: in batches of four and more the last sequence reads its neighbour's first page."""
    path = build(tmp_path, mode, 8)
    with LLM(LoadedBundle.open(path, sessions=_planted)) as engine:
        found = different(engine, expected, 8, mode=mode)
    assert len(found) >= 3, found


def _planted(bundle: LoadedBundle, graph: str, intermediates: Sequence[str]) -> Session:
    session = open_graph_of(bundle, graph, intermediates)
    return _NeighbourPage(session) if graph == "target" else session


class _NeighbourPage(Session):
    """Another session that is given wrong page tables."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return self._session.states

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(reduces=True)

    def bind(self, name: str, tensor: Tensor) -> None:
        self._session.bind(name, tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._session.run(self._wrong(inputs))

    def run_reduced(
        self, inputs: Mapping[str, Tensor], reduced: Mapping[str, Reduction]
    ) -> dict[str, Tensor]:
        return self._session.run_reduced(self._wrong(inputs), reduced)

    @staticmethod
    def _wrong(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        table = inputs["page_table"]
        count = int((table[:, 0] > 0).sum())  # behind them stands padding
        if count < 4:
            return inputs
        table = table.clone()
        table[count - 1, 0] = table[count - 2, 0]
        return {**inputs, "page_table": table}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
