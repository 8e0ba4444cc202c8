"""Sampled speculation says what the target would say, with the same probabilities; biased rules do
not.

The target is a language of 32 tokens in which a token's logits depend on the token before. The
draft's are the same with noise. Two tokens are drawn again and again after one root, by as many
cycles as it takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_eagle3.decode.speculation.propose import Proposal, Proposer

from tests.decode.chi_square import FALSE_ALARM, p_value
from tests.decode.reference_sampling import ref_penalised, ref_probs
from tests.decode.table import Path, TableDraft
from tests.decode.test_accept import likeliest_sibling, one_number_for_all, raw_sibling
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.sampling import sampler as sampling_module
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation import accept as accept_module
from trt_eagle3.decode.speculation import verify as verify_module
from trt_eagle3.decode.speculation.accept import Accepted, accept
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import Tree
from trt_eagle3.decode.speculation.verify import verify_tree
from trt_eagle3.decode.step.decoder import AnyTree

VOCAB, ROOT = 32, 7
DRAWS = 25_000  # suffice to tell a biased rule: each of ``FAULTS`` is caught with as many
_NOISE = torch.Generator().manual_seed(5)
TARGET = 2.0 * torch.randn(VOCAB, VOCAB, generator=_NOISE)
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_NOISE)

SHAPES: dict[str, AnyTree] = {
    "chain": Tree.from_paths([(0,), (0, 0), (0, 0, 0)]),
    "static tree": Tree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic tree": DynamicTree(steps=3, topk=3, num_nodes=10),
}
TEMPERATURES = [0.3, 1.0, 2.0]
FILTERS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
}


@lru_cache
def forest(shape: str) -> Proposal:
    """The draft's tree after each of the 32 tokens."""

    def table(b: int, path: Path) -> Tensor:
        return DRAFT[(b, *path)[-1]]

    draft = TableDraft(table, [1] * VOCAB, [1] * VOCAB)
    return Proposer(draft).propose(SHAPES[shape], draft.drafters(range(VOCAB)))


@dataclass(frozen=True)
class Judged:
    """The sampler's verdict on every tree: lists [32][T], and float64 [32, T, V] from which the
    bonus is drawn.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    probs: list[list[float]]
    weights: Tensor


def judged(shape: str, sampling: SamplingParams) -> Judged:
    """``Sampler.verdict`` of every tree, up to its random number."""
    trees, probs = forest(shape), []
    weights: list[Tensor] = []

    def keep(left: Tensor, _: Tensor) -> Tensor:
        weights.append(left)
        return torch.zeros(len(left), dtype=torch.int64)

    with patch.object(sampling_module, "_inverse_cdf", keep):
        for tokens, parents, mask in zip(trees.tokens, trees.parents, trees.mask, strict=True):
            sampler = Sampler(sampling, torch.tensor([ROOT]), VOCAB)
            probs.append(sampler.verdict(TARGET[tokens], tokens, parents, mask).accept.tolist())
    return Judged(trees.tokens.tolist(), trees.parents.tolist(), probs, torch.stack(weights))


def cycle(trees: Judged, roots: list[int], seed: int) -> Tensor:
    """int64 [n, 2]: the first two tokens of a cycle from each root; -1 where it says but one.

    The bonus tokens are drawn together, only where the walks ended.
    """
    uniform = random.Random(seed).random
    walks = [
        accept(trees.tokens[r], trees.parents[r], trees.probs[r], NO_BONUS, uniform) for r in roots
    ]
    ends = torch.tensor([walk.path[-1] for walk in walks])
    numbers = torch.rand(
        len(walks), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    bonus = sampling_module._inverse_cdf(trees.weights[torch.tensor(roots), ends], numbers)
    output_ids = torch.tensor([(*walk.tokens, *NO_BONUS)[:2] for walk in walks])
    lengths = torch.tensor([len(walk.path) - 1 for walk in walks])
    for i in (0, 1):
        output_ids[lengths == i, i] = bonus[lengths == i]
    output_ids[lengths == 0, 1] = -1
    return output_ids


NO_BONUS = [-1] * 16


def counted(trees: Judged) -> tuple[Tensor, Tensor]:
    """int64 [V]: how often each token came after ``ROOT``, and [V, V]: each two."""
    output_ids = cycle(trees, [ROOT] * DRAWS, seed=0)
    first = torch.bincount(output_ids[:, 0], minlength=VOCAB)
    alone = output_ids[:, 1] < 0
    if bool(alone.any()):
        output_ids[alone, 1] = cycle(trees, output_ids[alone, 0].tolist(), seed=1)[:, 0]
    both = torch.bincount(output_ids[:, 0] * VOCAB + output_ids[:, 1], minlength=VOCAB * VOCAB)
    return first, both.view(VOCAB, VOCAB)


@lru_cache
def exact(sampling: SamplingParams) -> Tensor:
    """float64 [V, V]: the probability of each two tokens after ``ROOT``, in plain Python."""
    step = torch.tensor([ref_probs(row, sampling) for row in TARGET.tolist()], dtype=torch.float64)
    return step[ROOT][:, None] * step


def p_values(counts: tuple[Tensor, Tensor], probs: Tensor) -> tuple[float, float]:
    """Of one token, and of two, whose probabilities are ``probs`` [V, V]."""
    return p_value(counts[0], probs.sum(dim=1)), p_value(counts[1], probs)


SETTINGS = [
    *((shape, temperature, "filtered") for shape in SHAPES for temperature in TEMPERATURES),
    *((shape, 1.0, "all tokens") for shape in SHAPES),
]


@pytest.mark.parametrize(("shape", "temperature", "filters"), SETTINGS)
def test_sampled_tokens_have_the_targets_probabilities(
    shape: str, temperature: float, filters: str
) -> None:
    sampling = SamplingParams(temperature, **FILTERS[filters])
    counts = counted(judged(shape, sampling))
    found = p_values(counts, exact(sampling))
    assert min(found) > FALSE_ALARM, found


def test_trees_of_these_tests_are_accepted_and_rejected_at_every_depth() -> None:
    for shape in SHAPES:
        trees = judged(shape, SamplingParams(1.0))
        uniform = random.Random(0).random
        lengths = {
            len(
                accept(
                    trees.tokens[ROOT], trees.parents[ROOT], trees.probs[ROOT], NO_BONUS, uniform
                ).path
            )
            for _ in range(2000)
        }
        assert lengths == {1, 2, 3, 4}


def fixed_share(weights: Tensor, uniform: Tensor) -> Tensor:
    """The residual is not renormalised: what is missing goes to the last token that has any."""
    last = VOCAB - 1 - (weights.flip(1) > 0).to(torch.uint8).argmax(dim=1)
    return torch.minimum(torch.searchsorted(weights.cumsum(1), uniform, right=True)[:, 0], last)


def greedy_rule(siblings: Any, probs: Any, _: Callable[[], float]) -> int | None:
    """What is likelier than not is taken for certain."""
    return next((node for node in siblings if probs[node] > 0.5), None)


_TARGET_PROBS = sampling_module.target_probs


def twice(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The filters again, over what they left."""
    return _TARGET_PROBS(_TARGET_PROBS(logits, sampling).log() * sampling.temperature, sampling)


def filters_first(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The filters look at probabilities before the temperature."""
    cold = SamplingParams(1.0, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    return _TARGET_PROBS(_TARGET_PROBS(logits, cold).log(), SamplingParams(sampling.temperature))


def keep_all(probs: Tensor, *_: Any) -> Tensor:
    return probs


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "sibling judged by its raw probability": (accept_module, "_chosen", raw_sibling),
    "one random number for all siblings": (accept_module, "_chosen", one_number_for_all),
    "only the likeliest sibling has a chance": (accept_module, "_chosen", likeliest_sibling),
    "likely tokens accepted for certain": (accept_module, "_chosen", greedy_rule),
    "residual not renormalised": (sampling_module, "_inverse_cdf", fixed_share),
    "bonus drawn from the unmasked distribution": (torch.Tensor, "index_put_", keep_all),
    "filters applied twice": (sampling_module, "target_probs", twice),
    "filters before temperature": (sampling_module, "target_probs", filters_first),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_biased_rule_fails_the_same_test(fault: str) -> None:
    sampling = SamplingParams(2.0, **FILTERS["filtered"])
    owner, name, wrong = FAULTS[fault]
    with patch.object(owner, name, wrong):
        counts = counted(judged("static tree", sampling))
    assert min(p_values(counts, exact(sampling))) < FALSE_ALARM


@pytest.mark.parametrize(
    "fault", ["bonus drawn from the unmasked distribution", "residual not renormalised"]
)
def test_biased_bonus_fails_the_same_test_on_a_chain(fault: str) -> None:
    owner, name, wrong = FAULTS[fault]
    with patch.object(owner, name, wrong):
        counts = counted(judged("chain", SamplingParams(1.0)))
    assert min(p_values(counts, exact(SamplingParams(1.0)))) < FALSE_ALARM


# The sampler's own random numbers, through ``verify_tree``


def sequences(
    samplings: list[SamplingParams], prompt: tuple[int, ...] = (ROOT,)
) -> list[SequenceState]:
    """Sequences that have said ``ROOT`` and nothing more."""
    tokens = torch.tensor(prompt)
    places = torch.zeros(3, len(prompt), dtype=torch.int32)
    shared = Prompt(tokens, places, 0, tokens < 0)
    made = []
    for sampling in samplings:
        s = SequenceState(shared, PagePool(1, 1), VOCAB, sampling)
        if sampling.penalised:
            s.sampler.first(torch.zeros(VOCAB))  # as after a prompt
        s.append_tokens((ROOT,))
        made.append(s)
    return made


def step(shape: str, batch: list[SequenceState], counts: list[int] | None = None) -> list[Accepted]:
    """One cycle of a batch; ``counts``: nodes that each one uses, all by default."""
    roots = torch.tensor([s.tokens[-1] for s in batch])
    proposal = Proposal(**{name: field[roots] for name, field in vars(forest(shape)).items()})
    found = verify_tree(
        batch, proposal, TARGET[proposal.tokens], counts or [proposal.tokens.shape[1]] * len(batch)
    )
    for s, accepted in zip(batch, found, strict=True):
        s.append_tokens(accepted.tokens)
    return found


def drawn(
    shape: str, sampling: SamplingParams, draws: int, prompt: tuple[int, ...] = (ROOT,)
) -> tuple[Tensor, Tensor]:
    """What ``counted`` counts, of sequences with seeds 0 to ``draws``."""
    batch = sequences([replace(sampling, seed=seed) for seed in range(draws)], prompt)
    while lacking := [s for s in batch if len(s.tokens) < 3]:
        step(shape, lacking)
    both = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    for s in batch:
        both[s.tokens[1], s.tokens[2]] += 1
    return both.sum(dim=1), both


@pytest.mark.parametrize("shape", SHAPES)
def test_judge_with_seeds_of_its_own_has_the_targets_probabilities(shape: str) -> None:
    sampling = SamplingParams(1.0, top_k=12)
    assert min(p_values(drawn(shape, sampling, 1000), exact(sampling))) > FALSE_ALARM


def test_one_seed_gives_one_answer_in_any_company() -> None:
    def answers(others: int) -> list[int]:
        batch = sequences(
            [
                SamplingParams(1.0, seed=11),
                *(SamplingParams(1.0, seed=seed) for seed in range(others)),
            ]
        )
        for _ in range(12):
            step("static tree", batch)
        return batch[0].tokens

    assert answers(0) == answers(0) == answers(3)


def test_batch_of_all_kinds_says_what_each_one_says_alone() -> None:
    """Greedy, sampled, penalised; and one that had no room for a tree."""
    kinds = [
        SamplingParams(),
        SamplingParams(1.0, seed=1),
        SamplingParams(0.0, presence_penalty=3.0),
        SamplingParams(0.7, top_p=0.9, repetition_penalty=1.4, seed=2),
        SamplingParams(2.0, seed=3),
    ]
    num_nodes = forest("static tree").tokens.shape[1]
    counts = [num_nodes, num_nodes, num_nodes, num_nodes, 1]
    together, alone = sequences(kinds), sequences(kinds)
    for _ in range(15):
        step("static tree", together, counts)
        for s, count in zip(alone, counts, strict=True):
            step("static tree", [s], [count])
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    assert len(together[4].tokens) == 16


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(0.0, presence_penalty=3.0)],
)
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e30])
def test_what_stands_in_padding_rows_is_nothing_to_a_sequence_without_room_for_a_tree(
    sampling: SamplingParams, padding: float
) -> None:
    """No kernel promises what it leaves there."""
    (alone,), (with_tree, root_only) = (
        sequences([sampling]),
        sequences([SamplingParams(), sampling]),
    )
    proposal = Proposal(
        **{name: field[[ROOT, ROOT]] for name, field in vars(forest("static tree")).items()}
    )
    logits = TARGET[proposal.tokens]
    logits[1, 1:] = padding
    num_nodes = logits.shape[1]
    accepted, one = verify_tree([with_tree, root_only], proposal, logits, [num_nodes, 1])
    assert len(accepted.tokens) > 1
    assert [one] == step("static tree", [alone], [1])
    assert (one.path, len(one.tokens)) == ((0,), 1)


def test_sequences_with_the_same_filters_are_judged_at_once_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two kinds of filters, seeds and penalties of their own."""
    kinds = [SamplingParams(1.0, top_p=0.9, seed=seed) for seed in range(4)]
    kinds += [
        SamplingParams(1.0, top_p=0.9, seed=4, presence_penalty=0.7),
        SamplingParams(0.5, seed=5),
        SamplingParams(0.5, seed=6),
    ]
    judged: list[int] = []

    def watched(logits: Tensor, sampling: SamplingParams) -> Tensor:
        judged.append(len(logits))
        return _TARGET_PROBS(logits, sampling)

    monkeypatch.setattr(sampling_module, "target_probs", watched)
    answers = []
    num_nodes = forest("static tree").tokens.shape[1]
    for most, groups in ((1 << 24, [5, 2]), (2 * num_nodes * VOCAB, [2, 2, 1, 2]), (1, [1] * 7)):
        monkeypatch.setattr(verify_module, "_MOST_PROBS", most)
        batch = sequences(kinds)
        judged.clear()
        step("static tree", batch)
        assert judged == [group * num_nodes for group in groups]
        for _ in range(10):
            step("static tree", batch)
        answers.append([s.tokens for s in batch])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(0.0, repetition_penalty=1.3, presence_penalty=0.8)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_says_what_plain_python_says_penalties_or_not(
    shape: str, sampling: SamplingParams
) -> None:
    (sequence,) = sequences([sampling], prompt=(3, 9, 9))
    while len(sequence.tokens) < 60:
        step(shape, [sequence])
    expected = [ROOT]
    while len(expected) < 60:
        logits = ref_penalised(TARGET[expected[-1]].tolist(), (3, 9, 9), expected, sampling)
        expected.append(logits.index(max(logits)))
    assert sequence.tokens[:60] == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_with_penalties_has_the_probabilities_of_each_path(shape: str) -> None:
    sampling = SamplingParams(1.0, repetition_penalty=1.5, presence_penalty=1.0, top_p=0.9)
    prompt = (3, 9)

    def after(*answer: int) -> Tensor:
        logits = ref_penalised(TARGET[answer[-1]].tolist(), prompt, answer, sampling)
        return torch.tensor(ref_probs(logits, sampling), dtype=torch.float64)

    probs = after(ROOT)[:, None] * torch.stack([after(ROOT, token) for token in range(VOCAB)])
    assert min(p_values(drawn(shape, sampling, 1000, prompt), probs)) > FALSE_ALARM
