"""The trained tiny mixture of experts through the whole program: it answers, it accepts,
speculation changes nothing, and transformers says the same.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tasks import examples

import trt_eagle3
from tests.test_tiny_pair import Answered, ask, best_tokens
from tests.tiny import MIXTURE, build_tiny_moe
from trt_eagle3.decode.llm import LLM

PROMPTS = 14
SEED = 7
MIN_EXACT = 0.9  # of image questions, held out
MIN_ACCEPTANCE_LENGTH = 3.0  # bonus token included, 5-step chain


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return trt_eagle3.load(build_tiny_moe(tmp_path_factory.mktemp("engines")))


@pytest.fixture(scope="module")
def answered(engine: LLM) -> list[Answered]:
    drawn = examples("heldout", SEED, PROMPTS)
    return [Answered(e, ask(engine, e, speculation=False), ask(engine, e)) for e in drawn]


def test_speculative_equals_plain_on_every_heldout_prompt(answered: list[Answered]) -> None:
    different = [a.example.prompt for a in answered if a.speculative.token_ids != a.plain.token_ids]
    assert different == []


def test_image_questions_are_answered_exactly(answered: list[Answered]) -> None:
    asked = [a for a in answered if a.example.kind != "text"]
    exact = sum(a.plain.text.strip() == a.example.answer for a in asked)
    assert exact / len(asked) >= MIN_EXACT


def test_chain_of_five_accepts_three_tokens_a_forward(answered: list[Answered]) -> None:
    lengths = [n for a in answered for n in a.speculative.accepted_lengths]
    assert sum(lengths) / len(lengths) >= MIN_ACCEPTANCE_LENGTH


def test_plain_equals_greedy_decoding_by_transformers(
    engine: LLM, answered: list[Answered]
) -> None:
    model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(
        MIXTURE / "target", dtype=torch.float32
    ).eval()
    for a in answered[:8]:
        videos = [list(a.example.frames)] if a.example.frames else []
        inputs = engine.prepare(a.example.prompt, list(a.example.images), videos)
        tokens = a.plain.token_ids
        assert best_tokens(model, inputs, tokens, engine) == tokens, a.example.prompt


def test_experts_lie_as_they_were_published_and_all_serve(engine: LLM) -> None:
    """[E, in, out]; routers whose experts were all alike would be a dense model."""
    tensors = load_file(MIXTURE / "target" / "model.safetensors")
    stacked = tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    assert stacked.shape == (8, 256, 128)
    apart = [(stacked[0] - other).float().norm() for other in stacked[1:]]
    assert min(apart) > 0.5 * float(stacked[0].float().norm())
    assert engine.bundle.spec.family == "qwen3_vl_moe"


def test_pair_is_small() -> None:
    files = [f for folder in ("target", "draft") for f in (MIXTURE / folder).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12_000_000
