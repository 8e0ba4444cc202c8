"""The trained tiny pair in batches: whatever runs beside a request, its answer is that of plain
decoding alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trt_eagle3
from tests.decode.heldout import heldout, plain_answers, request_of, served
from tests.decode.overwriting import ask_together, overwriting_llm
from tests.tiny import build_tiny

MODES: dict[str, dict[str, Any]] = {
    "chain": {"mode": "chain", "steps": 5, "adaptive": False},
    "tree": {"mode": "tree", "steps": 4, "topk": 3, "num_draft_tokens": 12, "adaptive": False},
    "dynamic": {
        "mode": "dynamic",
        "steps": 4,
        "topk": 4,
        "num_draft_tokens": 10,
        "adaptive": False,
    },
}

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    return plain_answers(folder / "plain")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_at_every_batch_size_says_what_plain_decoding_says(
    mode: str, folder: Path, expected: list[tuple[int, ...]]
) -> None:
    for batch_size in SIZES:
        # each size asks other questions: together they ask all of them
        chosen = slice(batch_size - 1, None, len(SIZES))
        limits = {"max_batch_size": batch_size, "max_kv_tokens": 1024 * ((batch_size + 1) // 2)}
        engine = trt_eagle3.load(build_tiny(folder / mode, limits=limits, speculation=MODES[mode]))
        requests = (request_of(e) for e in heldout()[chosen])
        found = [a.generation.token_ids for a in served(engine, requests, batch_size + 1)]
        now = engine.metrics()
        engine.close()
        asked = zip(heldout()[chosen], found, expected[chosen], strict=True)
        assert [e.prompt for e, a, b in asked if a != b] == []
        assert (now.acceptance_length or 0) > 3
        assert now.kv_pages_used == 0


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_the_next_run_overwrites_mix_nothing_up(
    mode: str, folder: Path, expected: list[tuple[int, ...]]
) -> None:
    """Pictures of one shape above all: a prompt's wait until it is prefilled, and others of its
    batch run meanwhile.
    """
    limits = {"max_batch_size": 4, "max_kv_tokens": 1024}
    engine = overwriting_llm(
        build_tiny(folder / "overwriting", limits=limits, speculation=MODES[mode])
    )
    size = {i: e.images[0].size for i, e in enumerate(heldout()) if e.kind == "image"}
    asked = [*sorted(size, key=lambda i: size[i])[:16], *range(16)]
    for start in range(0, len(asked), 8):
        some = asked[start : start + 8]
        assert ask_together(engine, [request_of(heldout()[i]) for i in some]) == [
            expected[i] for i in some
        ]
    engine.close()
