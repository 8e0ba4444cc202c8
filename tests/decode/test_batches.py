"""The trained tiny pair in batches: the answer of each request is that of decoding it alone
without speculation.
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
def test_every_mode_at_every_batch_size_emits_what_plain_decoding_does(
    mode: str, folder: Path, expected: list[tuple[int, ...]]
) -> None:
    for batch_size in SIZES:
        # other questions for each size: all of them in the end
        chosen = slice(batch_size - 1, None, len(SIZES))
        limits = {"max_batch_size": batch_size, "max_kv_tokens": 1024 * ((batch_size + 1) // 2)}
        engine = trt_eagle3.load(build_tiny(folder / mode, limits=limits, speculation=MODES[mode]))
        requests = (request_of(e) for e in heldout()[chosen])
        found = [a.generation.token_ids for a in served(engine, requests, batch_size + 1)]
        now = engine.metrics()
        engine.close()
        answers = zip(heldout()[chosen], found, expected[chosen], strict=True)
        assert [e.prompt for e, a, b in answers if a != b] == []
        assert (now.acceptance_length or 0) > 3
        assert now.kv_pages_used == 0


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_the_next_run_overwrites_change_no_answer(
    mode: str, folder: Path, expected: list[tuple[int, ...]]
) -> None:
    """Most are images of one shape: an image's embeddings are kept until its prompt is prefilled,
    and other images of the batch are encoded meanwhile.
    """
    limits = {"max_batch_size": 4, "max_kv_tokens": 1024}
    engine = overwriting_llm(
        build_tiny(folder / "overwriting", limits=limits, speculation=MODES[mode])
    )
    size = {i: e.images[0].size for i, e in enumerate(heldout()) if e.kind == "image"}
    chosen = [*sorted(size, key=lambda i: size[i])[:16], *range(16)]
    for start in range(0, len(chosen), 8):
        some = chosen[start : start + 8]
        found = ask_together(engine, [request_of(heldout()[i]) for i in some])
        assert found == [expected[i] for i in some]
    engine.close()
