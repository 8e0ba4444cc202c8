"""What is captured before the first request may be captured beside requests, too: they are answered
as without it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.decode.overwriting import overwriting_llm
from tests.tiny import ROOT, build_tiny
from trt_eagle3 import Request, SamplingParams

HYBRID = ROOT / "examples/tiny_hybrid/target"
LIMITS = {"max_batch_size": 2, "max_seq_len": 96, "max_visual_tokens": 20}
PROMPTS = [f"What is {i} plus {3 * i + 1}?" for i in range(5)]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return build_tiny(tmp_path, engine={"prefill_chunk": 24}, limits=LIMITS)


def test_capture_takes_no_place_of_a_hybrid_whose_places_are_all_taken(tmp_path: Path) -> None:
    """A recurrent layer has as many states as sequences may run."""
    limits = {**LIMITS, "max_batch_size": 1, "prefix_cache": False}
    changes = {"limits": limits, "engine": {"prefill_chunk": 24}}
    bundle = build_tiny(tmp_path, target=HYBRID, draft=None, **changes)
    with overwriting_llm(bundle) as engine:
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        expected = engine.submit(Request(PROMPTS[0], sampling=sampling)).finish().token_ids
        answer = engine.submit(Request(PROMPTS[0], sampling=sampling))
        reading = iter(answer)
        next(reading)
        assert engine.capture_graphs(0.05) > 0
        assert answer.finish().token_ids == expected
        assert engine.capture_graphs(0.05) > 0


def test_answers_beside_a_capture_are_those_without(bundle: Path) -> None:
    with overwriting_llm(bundle) as engine:
        sampling = SamplingParams(max_tokens=40)
        requests = [Request(prompt, sampling=sampling) for prompt in PROMPTS]
        expected = [engine.submit(request).finish().token_ids for request in requests]
        answers = [engine.submit(request) for request in requests]
        done = list[int]()
        threads = [
            threading.Thread(target=lambda: done.append(engine.capture_graphs(0.05)))
            for _ in range(3)
        ]
        reading = iter(answers[0])
        for thread in threads:
            next(reading, None)
            thread.start()
        assert [answer.finish().token_ids for answer in answers] == expected
        for thread in threads:
            thread.join(30)
        assert len(done) == 3
        assert engine.metrics().kv_pages_used == 0
