"""Decoding with block drafts: every chain is the reference's, and answers are the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.decode.chi_square import FALSE_ALARM, p_value
from tests.decode.pair import NUM_PAGES, VOCAB, make_prompt, run, shuffled_pool
from tests.decode.test_sampled_decoder import (
    SAMPLING,
    answers,
    logits_after,
    ref_penalised,
    ref_probs,
)
from tests.drafts.block.pair import DRAFTS, BlockPair, make_block_pair
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.sampling import sampler
from trt_eagle3.decode.speculation.tree import Tree

NUM_TOKENS = 24
LAYOUTS: dict[str, list[Any]] = {"text": [9], "image": [3, (2, 3), 4]}


def chain(num_drafts: int) -> Tree:
    return Tree.from_paths([(0,) * depth for depth in range(1, num_drafts + 1)])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], BlockPair]:
    found: dict[str, BlockPair] = {}

    def named(name: str) -> BlockPair:
        if name not in found:
            found[name] = make_block_pair(tmp_path_factory.mktemp("block"), name)
        return found[name]

    return named


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("num_drafts", [5, 2])
def test_every_chain_is_the_references_and_the_answer_the_targets(
    pairs: Callable[[str], BlockPair], name: str, layout: str, num_drafts: int
) -> None:
    block = pairs(name)
    prompt = make_prompt(block.pair, LAYOUTS[layout], seed=1)
    plain = run(block.pair, prompt, None, num_tokens=NUM_TOKENS).tokens
    pool = shuffled_pool()
    decoder = block.decoder(NUM_PAGES)
    sequence = SequenceState(prompt, pool, VOCAB, drafting=True)
    found: list[int] = []
    for tokens in decoder.run(sequence, chain(num_drafts)):
        found += tokens
        if len(found) >= NUM_TOKENS:
            break
    assert found[:NUM_TOKENS] == plain[:NUM_TOKENS]
    chains = [
        c for c in decoder.drafter.drafted.chains if c[0] < len(prompt.token_ids) + NUM_TOKENS
    ]
    assert len(chains) >= 4
    context = block.context(prompt, plain)
    for length, (root, *drafts) in chains:
        assert drafts == block.chain(context, root, length, num_drafts), length


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark gated, reduced vocabulary"])
def test_sampled_tokens_have_the_targets_probabilities(
    pairs: Callable[[str], BlockPair], name: str
) -> None:
    """Drafts are drawn at random, and verified by the distribution that they were drawn from."""
    assert sampled_p_value(pairs(name)) > FALSE_ALARM


def test_bonus_token_from_the_whole_distribution_is_caught(
    pairs: Callable[[str], BlockPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a draft is rejected, its distribution is not subtracted."""
    verify = sampler._less_drawn

    def whole(probs: Any, *args: Any) -> Any:
        return verify(probs, *args)[0], probs

    monkeypatch.setattr(sampler, "_less_drawn", whole)
    assert sampled_p_value(pairs("dflash")) < FALSE_ALARM


def sampled_p_value(block: BlockPair) -> float:
    prompt = make_prompt(block.pair, LAYOUTS["text"], seed=1)

    def after(*answer: int) -> torch.Tensor:
        logits = logits_after(block.pair, prompt, answer)
        penalised = ref_penalised(logits, prompt.token_ids.tolist(), answer, SAMPLING)
        return torch.tensor(ref_probs(penalised, SAMPLING), dtype=torch.float64)

    exact = after()[:, None] * torch.stack([after(token) for token in range(VOCAB)])
    decoder = block.decoder(1200)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    for batch in range(4):
        seeds = range(batch * 150, (batch + 1) * 150)
        samplings = [replace(SAMPLING, seed=s) for s in seeds]
        for first, second in answers(decoder, prompt, chain(3), samplings, 2)[0]:
            counts[first, second] += 1
    return p_value(counts, exact)
