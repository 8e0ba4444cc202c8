"""The trained tiny pair through the whole program: it answers, it accepts, and speculation
changes nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tasks import Example, examples

import trt_eagle3
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.decode.llm import LLM, Generation
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.multimodal import ModelInputs

PROMPTS = 24
SEED = 21
MAX_TOKENS = 96
MIN_EXACT = 0.95  # of image questions, held out
MIN_ACCEPTANCE_LENGTH = 3.0  # bonus token included, 5-step chain


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return trt_eagle3.load(build_tiny(tmp_path_factory.mktemp("engines")))


@cache
def heldout() -> tuple[Example, ...]:
    return tuple(examples("heldout", SEED, PROMPTS))


@dataclass(frozen=True)
class Answered:
    example: Example
    plain: Generation
    speculative: Generation


def ask(engine: LLM, example: Example, **options: object) -> Generation:
    videos = [list(example.frames)] if example.frames else []
    return engine.generate(
        example.prompt, images=list(example.images), videos=videos, max_tokens=MAX_TOKENS, **options
    )


@pytest.fixture(scope="module")
def answered(engine: LLM) -> list[Answered]:
    return [Answered(e, ask(engine, e, speculation=False), ask(engine, e)) for e in heldout()]


def test_heldout_prompts_cover_every_kind() -> None:
    kinds = [e.kind for e in heldout()]
    assert all(kinds.count(kind) >= 4 for kind in ("text", "image", "two_images", "frames"))


def test_speculative_equals_plain_on_every_heldout_prompt(answered: list[Answered]) -> None:
    different = [a.example.prompt for a in answered if a.speculative.token_ids != a.plain.token_ids]
    assert different == []


@pytest.fixture(scope="module")
def by_frequency(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft with its vocabulary in another order, as ModelOpt writes it: target ids do not
    ascend.
    """
    folder = tmp_path_factory.mktemp("by_frequency")
    tensors = load_file(DRAFT / "model.safetensors")
    count = len(tensors["d2t"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))
    tensors["d2t"] = (tensors["d2t"] + torch.arange(count))[order] - torch.arange(count)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(DRAFT / "config.json", folder)
    return folder


MODES: dict[str, dict[str, Any]] = {
    "chain": {},
    "dynamic": {"mode": "dynamic", "steps": 4, "topk": 3, "num_draft_tokens": 10},
}


@pytest.mark.parametrize("mode", MODES)
def test_order_of_the_drafts_vocabulary_changes_no_answer_and_no_acceptance(
    mode: str, by_frequency: Path, tmp_path: Path
) -> None:
    bundles = [
        build_tiny(tmp_path / draft.name, draft=draft, speculation=MODES[mode])
        for draft in (DRAFT, by_frequency)
    ]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"grammar": Grammar.choice(["four cats", "fourteen", "two"])},
    ]
    found = []
    for bundle in bundles:
        with trt_eagle3.load(bundle) as engine:
            asked = [ask(engine, heldout()[i], **o) for i, o in enumerate(options)]
            found.append([(a.token_ids, a.accepted_lengths) for a in asked])
    assert found[0] == found[1]
    assert any(max(lengths, default=0) > 2 for _, lengths in found[0])


def test_image_questions_are_answered_exactly(answered: list[Answered]) -> None:
    asked = [a for a in answered if a.example.kind != "text"]
    exact = sum(a.plain.text.strip() == a.example.answer for a in asked)
    assert exact / len(asked) >= MIN_EXACT


def test_chain_of_five_accepts_three_tokens_a_pass(answered: list[Answered]) -> None:
    lengths = [n for a in answered for n in a.speculative.accepted_lengths]
    assert sum(lengths) / len(lengths) >= MIN_ACCEPTANCE_LENGTH


def test_accepted_lengths_add_up_to_the_answer(answered: list[Answered]) -> None:
    for a in answered:
        assert 1 + sum(a.speculative.accepted_lengths) == len(a.speculative.token_ids)


@pytest.mark.parametrize(
    "speculation",
    [
        {"mode": "tree", "steps": 4, "topk": 3, "num_draft_tokens": 12},
        {"mode": "tree", "steps": 3, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))},
    ],
    ids=["best-first", "given"],
)
def test_static_tree_equals_plain(
    speculation: dict[str, object], answered: list[Answered], tmp_path: Path
) -> None:
    tree = trt_eagle3.load(build_tiny(tmp_path, speculation=speculation))
    for a in answered[:8]:
        assert ask(tree, a.example).token_ids == a.plain.token_ids


def test_plain_equals_greedy_decoding_by_transformers_on_every_heldout_prompt(
    engine: LLM, answered: list[Answered]
) -> None:
    """One pass over prompt and answer: each token is the best after those before it.

    And the answer ends where it should.
    """
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        TARGET, dtype=torch.float32
    ).eval()
    ends = model.generation_config.eos_token_id
    for a in answered:
        tokens = a.plain.token_ids
        videos = [list(a.example.frames)] if a.example.frames else []
        inputs = engine.prepare(a.example.prompt, list(a.example.images), videos)
        assert best_tokens(model, inputs, tokens, engine) == tokens, a.example.prompt
        assert [t in ends for t in tokens] == [False] * (len(tokens) - 1) + [
            len(tokens) < MAX_TOKENS or tokens[-1] in ends
        ]


@torch.inference_mode()
def best_tokens(
    model: torch.nn.Module, inputs: ModelInputs, tokens: tuple[int, ...], engine: LLM
) -> tuple[int, ...]:
    """At each place of ``tokens``."""
    ids = torch.cat([inputs.token_ids, torch.tensor(tokens)])
    kind = (ids == engine.bundle.spec.vision.image_token_id).int() + 2 * (
        ids == engine.bundle.spec.vision.video_token_id
    ).int()
    arguments = {"mm_token_type_ids": kind[None]}
    if len(inputs.patches):
        names = (
            ("pixel_values_videos", "video_grid_thw")
            if (kind == 2).any()
            else ("pixel_values", "image_grid_thw")
        )
        arguments |= dict(zip(names, (inputs.patches, inputs.grid_thw), strict=True))
    logits = model(ids[None], logits_to_keep=len(tokens) + 1, **arguments).logits
    return tuple(logits[0, :-1].argmax(-1).tolist())
