"""Sampling and penalties through the whole decoder, against transformers' logits of the random
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.chi_square import FALSE_ALARM, p_value
from tests.decode.pair import PAGE_SIZE, PREFILL_CHUNK, VOCAB, Pair, make_pair, make_prompt
from tests.decode.reference_sampling import ref_penalised, ref_probs
from trt_eagle3.decode.forward.runner import DraftRunner, TargetRunner
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.spec import RopeSpec

NUM_PAGES, BATCH, BATCHES = 1200, 150, 4
TREES: dict[str, AnyTree | None] = {
    "plain": None,
    "chain": Tree.from_paths([(0,), (0, 0), (0, 0, 0)]),
    "static tree": Tree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0)]),
    "dynamic tree": DynamicTree(depth=3, topk=3, num_nodes=10),
}
LAYOUTS: dict[str, list[Any]] = {"text": [9], "image": [3, (2, 2), 2]}
SAMPLING = SamplingParams(
    temperature=0.8, top_k=9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(
        tmp_path_factory.mktemp("pair"),
        seed=2,
        rope=RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1)),
    )


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> Decoder:
    """With room for a batch."""
    m, sessions = pair.draft.manifest, pair.sessions
    slots = NUM_PAGES * PAGE_SIZE
    states = {name: layer_states(sessions[name].states, slots) for name in ("target", "draft")}
    target = TargetRunner(
        sessions["target"], states["target"], pair.tables[0], pair.target.spec.num_visual_levels
    )
    draft = DraftRunner(
        sessions["fuse"], sessions["draft"], states["draft"], pair.tables[1], pair.d2t
    )
    drafter = EagleDrafter(draft, m, max_rows=PREFILL_CHUNK)
    return Decoder(target, drafter, max_seq_len=96, prefill_chunk=PREFILL_CHUNK)


def logits_after(pair: Pair, prompt: Prompt, answer: Sequence[int]) -> list[float]:
    """Transformers' logits [V] after prompt and answer."""
    tokens = torch.cat([prompt.token_ids, torch.tensor(answer, dtype=torch.int64)])
    visual = torch.zeros(len(tokens), dtype=torch.bool)
    visual[: len(prompt.token_ids)] = prompt.visual_rows
    embeds = pair.tables[0].lookup(tokens)
    embeds[visual] = prompt.vision.embeds
    positions = prompt.positions(0, len(tokens)).long()
    states = pair.target.states(embeds, positions, visual, prompt.vision.visual_levels)
    return states.logits[-1].tolist()  # type: ignore[no-any-return]


def answers(
    decoder: Decoder,
    prompt: Prompt,
    tree: AnyTree | None,
    samplings: Sequence[SamplingParams],
    count: int,
) -> Any:
    """``count`` tokens of each of a batch, and how many cycles that took."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    batch = [
        SequenceState(prompt, pool, VOCAB, sampling, drafting=tree is not None)
        for sampling in samplings
    ]
    for s in batch:
        s.pages.reserve(len(prompt.token_ids))
    while not batch[0].prefilled:
        step = min(PREFILL_CHUNK, batch[0].num_prefill - batch[0].num_computed_tokens)
        decoder.prefiller.run([(s, step) for s in batch]).append()
    cycles = 0
    while lacking := [s for s in batch if len(s.tokens) < count]:
        for s in lacking:
            s.pages.reserve(decoder.rows_wanted(s, tree))
        decoder.step(lacking, tree)
        cycles += len(lacking)
    for s in batch:
        decoder.states.release(s)
    assert pool.num_used == 0
    return [s.tokens[:count] for s in batch], cycles


@pytest.fixture(scope="module")
def exact(pair: Pair) -> dict[str, Tensor]:
    """float64 [V, V]: the probability of each first two tokens, by layout."""
    found = {}
    for name, layout in LAYOUTS.items():
        prompt = make_prompt(pair, layout, seed=1)
        output_ids = prompt.token_ids.tolist()

        def after(
            *answer: int, prompt: Prompt = prompt, output_ids: list[int] = output_ids
        ) -> Tensor:
            logits = ref_penalised(logits_after(pair, prompt, answer), output_ids, answer, SAMPLING)
            return torch.tensor(ref_probs(logits, SAMPLING), dtype=torch.float64)

        found[name] = after()[:, None] * torch.stack([after(token) for token in range(VOCAB)])
    return found


@pytest.mark.parametrize(
    ("tree", "layout"),
    [*((tree, "text") for tree in TREES), ("static tree", "image"), ("dynamic tree", "image")],
)
def test_first_tokens_of_sampled_answers_have_transformers_probabilities(
    pair: Pair, decoder: Decoder, exact: dict[str, Tensor], tree: str, layout: str
) -> None:
    prompt = make_prompt(pair, LAYOUTS[layout], seed=1)
    output_ids: list[list[int]] = []
    num_cycles = 0
    for batch in range(BATCHES):
        seeds = range(batch * BATCH, (batch + 1) * BATCH)
        samplings = [replace(SAMPLING, seed=seed) for seed in seeds]
        found, cycles = answers(decoder, prompt, TREES[tree], samplings, 3)
        num_cycles += cycles
        output_ids += found
    first, second, third = torch.tensor(output_ids).T
    probs = exact[layout]
    values = [p_value(torch.bincount(first, minlength=VOCAB), probs.sum(1))]
    values.append(
        p_value(
            torch.bincount(first * VOCAB + second, minlength=VOCAB**2).view(VOCAB, VOCAB), probs
        )
    )
    # the third token after the commonest two
    begun = divmod(int(torch.mode(first * VOCAB + second).values), VOCAB)
    logits = ref_penalised(
        logits_after(pair, prompt, begun), prompt.token_ids.tolist(), begun, SAMPLING
    )
    after = third[(first == begun[0]) & (second == begun[1])]
    values.append(
        p_value(
            torch.bincount(after, minlength=VOCAB),
            torch.tensor(ref_probs(logits, SAMPLING), dtype=torch.float64),
        )
    )
    assert min(values) > FALSE_ALARM, values
    # drafts were accepted now and then
    assert (num_cycles < 2 * BATCH * BATCHES) == (tree != "plain")


def test_biased_sampler_is_caught_through_the_decoder(
    pair: Pair, decoder: Decoder, exact: dict[str, Tensor], monkeypatch: Any
) -> None:
    """The bonus of a rejected tree is drawn with the rejected tokens among it."""
    monkeypatch.setattr(torch.Tensor, "index_put_", lambda self, *_: self)
    prompt = make_prompt(pair, LAYOUTS["text"], seed=1)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    for batch in range(BATCHES):
        samplings = [
            replace(SAMPLING, seed=seed) for seed in range(batch * BATCH, (batch + 1) * BATCH)
        ]
        for first, second in answers(decoder, prompt, TREES["static tree"], samplings, 2)[0]:
            counts[first, second] += 1
    assert p_value(counts, exact["text"]) < FALSE_ALARM


GREEDY_PENALTIES = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.9),
    SamplingParams(repetition_penalty=1.1, presence_penalty=1.5),
]


def test_greedy_with_penalties_says_what_transformers_logits_say_in_every_mode(
    pair: Pair, decoder: Decoder
) -> None:
    prompt = make_prompt(pair, LAYOUTS["image"], seed=3)
    expected = []
    for sampling in GREEDY_PENALTIES:
        output_ids: list[int] = []
        while len(output_ids) < 16:
            logits = ref_penalised(
                logits_after(pair, prompt, output_ids),
                prompt.token_ids.tolist(),
                output_ids,
                sampling,
            )
            output_ids.append(logits.index(max(logits)))
        expected.append(output_ids)
    assert len({tuple(output_ids) for output_ids in expected}) == 3
    for tree in TREES.values():
        found, _ = answers(decoder, prompt, tree, GREEDY_PENALTIES, 16)
        assert found == expected
    # a decoder that forgets its answer says something else
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "remember", lambda *_: None)
        assert answers(decoder, prompt, TREES["chain"], GREEDY_PENALTIES, 16)[0] != expected


@pytest.mark.parametrize("tree", TREES)
def test_same_seed_same_request_same_batch_shape_gives_the_same_tokens(
    pair: Pair, decoder: Decoder, tree: str
) -> None:
    prompt = make_prompt(pair, LAYOUTS["image"], seed=1)

    def output_ids(*seeds: int) -> list[list[int]]:
        samplings = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
        return answers(decoder, prompt, TREES[tree], samplings, 25)[0]

    first, again = output_ids(1, 2, 1), output_ids(1, 2, 1)
    assert first == again
    assert first[0] == first[2] != first[1]
