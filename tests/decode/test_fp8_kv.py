"""Decoding over FP8 keys and values: what speculation, batches, reuse and preemption leave as it
is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import build_tiny
from trt_eagle3 import LLM, load
from trt_eagle3.decode.memory.kv_cache import KVCache
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.spec import StateSpec

PROMPTS = ("What is 3 plus 4?", "Why is the sky so blue?", "Name a color. " * 6, "Hello")
TOKENS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
FEWER: dict[str, Any] = {**TOKENS, "max_tokens": 14}
"""Of each way to draft: whoever is preempted needs more."""
MODES: dict[str, dict[str, Any]] = {
    "chain": {"mode": "chain", "steps": 4},
    "tree": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 10},
    "dynamic": {"mode": "dynamic", "steps": 3, "topk": 3, "num_draft_tokens": 12},
}
_MOST_ROUNDS = 8  # who is preempted, and when, follows measured costs


def fp8_engine(folder: Path, backend: str, mode: str = "tree", **limits: Any) -> LLM:
    engine = {"backend": backend, "kv_dtype": "fp8"}
    return load(build_tiny(folder, engine=engine, speculation=MODES[mode], limits=limits))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What is said of each prompt by itself, without speculation."""
    with fp8_engine(tmp_path_factory.mktemp("alone"), "torch") as llm:
        answers = [llm.generate(p, **TOKENS, speculation=False) for p in PROMPTS]
    return [list(answer.token_ids) for answer in answers]


@pytest.mark.parametrize(
    ("backend", "mode"), [("torch", "tree"), ("onnxruntime", "chain"), ("torch", "dynamic")]
)
def test_speculation_over_fp8_kv_says_what_plain_decoding_says(
    backend: str, mode: str, tmp_path: Path, alone: list[list[int]]
) -> None:
    with fp8_engine(tmp_path, backend, mode) as llm:
        found = [llm.generate(p, **FEWER) for p in PROMPTS]
        together = llm.generate(list(PROMPTS), **FEWER)
    expected = [tokens[: FEWER["max_tokens"]] for tokens in alone]
    assert [list(answer.token_ids) for answer in found] == expected
    assert [list(answer.token_ids) for answer in together] == expected
    assert max(answer.acceptance_length for answer in found) > 1


def test_fp8_kv_of_reused_pages_and_of_preempted_sequences_says_the_same(
    tmp_path: Path, alone: list[list[int]]
) -> None:
    limits = {"max_seq_len": 128, "max_kv_tokens": 160, "max_visual_tokens": 64}
    with fp8_engine(tmp_path, "torch", **limits) as llm:
        for rounds in range(_MOST_ROUNDS):
            together = llm.generate(list(PROMPTS), **TOKENS)
            assert [list(answer.token_ids) for answer in together] == alone
            metrics = llm.metrics()
            if rounds and metrics.preempted:
                break
    assert metrics.preempted > 0
    assert metrics.reused_tokens > 0


def test_fp8_kv_rounds_the_targets_states_alone_and_the_record_says_the_scales(
    tmp_path: Path,
) -> None:
    with fp8_engine(tmp_path, "torch") as llm:
        bundle = llm.bundle
        states = bundle.open_graph("target").states
        assert {state.dtype for state in states} == {"uint8"}
        assert {state.dtype for state in bundle.open_graph("draft").states} == {"float32"}
        record = read_bundle(bundle.path)
    assert sorted(record.kv_scales) == list(range(bundle.spec.num_layers))
    assert {scales.k for scales in record.kv_scales.values()} == {(1.0,)}


def test_kv_cache_of_bytes_has_a_byte_a_number_and_moves_rows() -> None:
    states = [
        StateSpec(f"{kind}_cache.{k}", "paged", (2, 8), "uint8") for k in (0, 1) for kind in "kv"
    ]
    cache = KVCache(states, 64)
    assert cache.num_bytes == 4 * 64 * 2 * 8
    buffers = dict(cache.bindings())
    for i, state in enumerate(states):
        buffers[state.name].copy_(torch.arange(64, dtype=torch.uint8)[:, None, None] + i)
    cache.move(torch.tensor([9, 11]), torch.tensor([8, 9]))
    for i, state in enumerate(states):
        assert buffers[state.name][8:10, 0, 0].tolist() == [9 + i, 11 + i]
