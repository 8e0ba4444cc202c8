"""Sampled speculation emits the target's tokens with the target's probabilities; biased rules do
not.

The target is a language of 32 tokens in which a token's logits depend on the token before. The
draft's are the same with noise. Two tokens are drawn again and again after one root, in one batch
of sequences with seeds of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.decode.chi_square import FALSE_ALARM, p_value
from tests.decode.reference_sampling import ref_penalised, ref_probs
from tests.decode.stub import Stub, verify_step
from tests.decode.table import TableDraft
from trt_eagle3.decode.sampling import sampler as sampling_module
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.decode.sampling.sampling_params import SamplingParams
from trt_eagle3.decode.speculation import verify as verify_module
from trt_eagle3.decode.speculation.accept import Accepted
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.grow import TreeGrower
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

VOCAB, ROOT = 32, 21  # one after which many tokens are likely
DRAWS = 8_000  # suffice to tell a biased rule: each of ``FAULTS`` is caught with as many
_NOISE = torch.Generator().manual_seed(5)
TARGET = 2.0 * torch.randn(VOCAB, VOCAB, generator=_NOISE)
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_NOISE)

SHAPES: dict[str, AnyTree] = {
    "chain": Tree.from_paths([(0,), (0, 0), (0, 0, 0)]),
    "static tree": Tree.from_paths([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic tree": DynamicTree(depth=3, topk=3, num_nodes=10),
}
TREE = SHAPES["static tree"]
GARBAGE = math.nan  # logits of what is not verified
ALL: dict[str, Any] = {}
FILTERED = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@lru_cache
def forest(tree: AnyTree) -> Proposal:
    """The draft's ``tree`` after each of the 32 tokens."""
    draft = TableDraft(lambda b, path: DRAFT[(b, *path)[-1]], [1] * VOCAB, [1] * VOCAB)
    return TreeGrower(draft).grow(tree, draft.inputs(range(VOCAB)))


def stubs(samplings: list[SamplingParams], prompt: tuple[int, ...] = (ROOT,)) -> list[Stub]:
    """Sequences that have emitted ``ROOT`` and nothing more."""
    made = [Stub(Sampler(sampling, torch.tensor(prompt), VOCAB)) for sampling in samplings]
    for s in made:
        s.append(Accepted((ROOT,)))
    return made


def drafted(
    tree: AnyTree, batch: list[Stub], num_kept: list[int] | None = None, garbage: float = GARBAGE
) -> tuple[Proposal, Tensor]:
    """The proposal for a batch that is padded by a row, and the target's logits."""
    trees, roots = forest(tree), torch.tensor([*(s.tokens[-1] for s in batch), 0])
    fields = (trees.tokens, trees.parents, trees.depths, trees.mask)
    proposal = Proposal(tree, *(field[roots] for field in fields))
    logits = TARGET[proposal.tokens]
    logits[-1] = garbage
    if num_kept is not None:
        proposal = replace(proposal, num_kept=torch.tensor([*num_kept, 1], dtype=torch.int32))
        logits[proposal.dropped()] = garbage
    return proposal, logits


def step(tree: AnyTree, batch: list[Stub], *args: Any) -> list[Accepted]:
    return verify_step(batch, *drafted(tree, batch, *args))


def drawn(
    tree: AnyTree, sampling: SamplingParams, draws: int = DRAWS, prompt: tuple[int, ...] = (ROOT,)
) -> Tensor:
    """int64 [V, V]: how often each two tokens came after ``ROOT``, of seeds 0 to ``draws``. Of
    every second sequence some nodes are dropped.
    """
    batch = lacking = stubs([replace(sampling, seed=seed) for seed in range(draws)], prompt)
    count = tree.num_nodes
    while lacking:
        step(tree, lacking, [1 + i // 2 % count if i % 2 else count for i in range(len(lacking))])
        lacking = [s for s in lacking if len(s.tokens) < 3]
    pairs = torch.tensor([VOCAB * s.tokens[1] + s.tokens[2] for s in batch])
    return torch.bincount(pairs, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


@lru_cache
def exact(sampling: SamplingParams) -> Tensor:
    """float64 [V, V]: the probability of each two tokens after ``ROOT``, in plain Python."""
    probs = torch.tensor([ref_probs(row, sampling) for row in TARGET.tolist()], dtype=torch.float64)
    return probs[ROOT][:, None] * probs


def least_p_value(counts: Tensor, probs: Tensor) -> float:
    """Of the first token, and of both, whose probabilities are ``probs`` [V, V]."""
    return min(p_value(counts.sum(dim=1), probs.sum(dim=1)), p_value(counts, probs))


@pytest.mark.parametrize(
    ("temperature", "filters"), [(0.3, FILTERED), (1.0, FILTERED), (2.0, FILTERED), (1.0, ALL)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_tokens_have_the_targets_probabilities(
    shape: str, temperature: float, filters: dict[str, Any]
) -> None:
    sampling = SamplingParams(temperature, **filters)
    assert least_p_value(drawn(SHAPES[shape], sampling), exact(sampling)) > FALSE_ALARM


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_these_tests_are_accepted_and_rejected_at_every_depth(shape: str) -> None:
    found = step(SHAPES[shape], stubs([SamplingParams(1.0, seed=seed) for seed in range(2000)]))
    assert {len(accepted.tokens) for accepted in found} == {1, 2, 3, 4}


def fixed_share(weights: Tensor, uniform: Tensor) -> Tensor:
    """The residual is not renormalised: what is missing goes to the last token that has any."""
    last = VOCAB - 1 - (weights.flip(1) > 0).to(torch.uint8).argmax(dim=1)
    return torch.minimum(torch.searchsorted(weights.cumsum(1), uniform, right=True)[:, 0], last)


_ACCEPT, _UPCOMING = verify_module.accept_sampled, Sampler.upcoming
_PRUNED, _TARGET_PROBS = Proposal.pruned, sampling_module.target_probs


def accept_with(change: Callable[[Proposal, Tensor], Tensor]) -> Any:
    """Acceptance by other probabilities than the target's."""
    return lambda proposal, probs, *more: _ACCEPT(proposal, change(proposal, probs), *more)


def siblings(proposal: Proposal) -> Tensor:
    """bool [B, T, T]: which nodes have one parent."""
    return proposal.parents[:, :, None] == proposal.parents[:, None, :]


def raw_sibling(proposal: Proposal, probs: Tensor) -> Tensor:
    """Each sibling passes with its own probability, as if none before it had been rejected."""
    return probs * torch.where(siblings(proposal).tril(-1), 1 - probs[:, None], 1).prod(dim=2)


def likeliest_sibling(proposal: Proposal, probs: Tensor) -> Tensor:
    return probs * (probs == (siblings(proposal) * probs[:, None]).amax(dim=2))


def likely_is_certain(_: Proposal, probs: Tensor) -> Tensor:
    return (probs > 0.5).double()


def one_number(proposal: Proposal, probs: Tensor, bonus: Tensor, uniform: Tensor) -> Any:
    return _ACCEPT(proposal, probs, bonus, uniform[:, :1].expand_as(uniform))


def bonus_number(sampler: Sampler, count: int) -> list[float]:
    """The walk begins with the number that draws the bonus token."""
    numbers = _UPCOMING(sampler, count)
    return numbers[:1] + numbers[:-1]


def keep_parents(proposal: Proposal) -> Proposal:
    """Dropped nodes stay children of their parents."""
    return replace(_PRUNED(proposal), parents=proposal.on_device().parents)


def twice(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The filters again, over what they left."""
    return _TARGET_PROBS(_TARGET_PROBS(logits, sampling).log() * sampling.temperature, sampling)


def filters_first(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The filters look at probabilities before the temperature."""
    cold = replace(sampling, temperature=1.0)
    return _TARGET_PROBS(_TARGET_PROBS(logits, cold).log(), SamplingParams(sampling.temperature))


UNMASKED = (torch.Tensor, "index_put_", lambda probs, *_: probs)
FIXED_SHARE = (sampling_module, "_inverse_cdf", fixed_share)
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "raw probability of a sibling": (verify_module, "accept_sampled", accept_with(raw_sibling)),
    "one random number for all": (verify_module, "accept_sampled", one_number),
    "likeliest sibling alone": (verify_module, "accept_sampled", accept_with(likeliest_sibling)),
    "likely tokens are certain": (verify_module, "accept_sampled", accept_with(likely_is_certain)),
    "random number of the bonus token used twice": (Sampler, "upcoming", bonus_number),
    "residual not renormalised": FIXED_SHARE,
    "bonus drawn from the unmasked distribution": UNMASKED,
    "filters applied twice": (sampling_module, "target_probs", twice),
    "filters before temperature": (sampling_module, "target_probs", filters_first),
    "dropped nodes are not pruned": (Proposal, "pruned", Proposal.on_device),
    "dropped nodes keep their parents": (Proposal, "pruned", keep_parents),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_biased_rule_fails_the_same_test(fault: str) -> None:
    sampling = SamplingParams(2.0, **FILTERED)
    with patch.object(*FAULTS[fault]):
        counts = drawn(TREE, sampling)
    assert least_p_value(counts, exact(sampling)) < FALSE_ALARM


@pytest.mark.parametrize("fault", [UNMASKED, FIXED_SHARE])
def test_biased_bonus_fails_the_same_test_on_a_chain(fault: Any) -> None:
    with patch.object(*fault):
        counts = drawn(SHAPES["chain"], SamplingParams(1.0))
    assert least_p_value(counts, exact(SamplingParams(1.0))) < FALSE_ALARM


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_with_penalties_has_the_probabilities_of_each_path(shape: str) -> None:
    sampling = SamplingParams(1.0, repetition_penalty=1.5, presence_penalty=1.0, top_p=0.9)
    prompt = (3, 9)

    def after(*answer: int) -> Tensor:
        logits = ref_penalised(TARGET[answer[-1]].tolist(), prompt, answer, sampling)
        return torch.tensor(ref_probs(logits, sampling), dtype=torch.float64)

    probs = after(ROOT)[:, None] * torch.stack([after(ROOT, token) for token in range(VOCAB)])
    counts = drawn(SHAPES[shape], sampling, 1000, prompt)
    assert least_p_value(counts, probs) > FALSE_ALARM


def test_one_seed_gives_one_answer_in_any_batch() -> None:
    def answer(others: int) -> list[int]:
        batch = stubs([SamplingParams(1.0, seed=seed) for seed in (11, *range(others))])
        for _ in range(12):
            step(TREE, batch)
        return batch[0].tokens

    assert answer(0) == answer(0) == answer(3)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_of_all_kinds_emits_what_each_one_emits_alone(shape: str) -> None:
    """Greedy, sampled, penalised; and two of which few nodes are verified."""
    kinds = [
        SamplingParams(),
        SamplingParams(1.0, seed=1),
        SamplingParams(0.0, presence_penalty=3.0),
        SamplingParams(0.7, top_p=0.9, repetition_penalty=1.4, seed=2),
        SamplingParams(2.0, seed=3),
        SamplingParams(0.0, repetition_penalty=1.3),
    ]
    tree = SHAPES[shape]
    num_kept = [tree.num_nodes] * 4 + [1, 3]
    batch, alone = stubs(kinds), stubs(kinds)
    for _ in range(15):
        step(tree, batch, num_kept)
        for s, kept in zip(alone, num_kept, strict=True):
            step(tree, [s], None if kept == tree.num_nodes else [kept])
    assert [s.tokens for s in batch] == [s.tokens for s in alone]
    assert len(batch[4].tokens) == 16


KINDS = [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(0.0, presence_penalty=3.0)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sequence_whose_logits_are_not_finite_emits_nothing(
    shape: str, sampling: SamplingParams, bad: float
) -> None:
    tree, batch = SHAPES[shape], stubs([sampling] * 2)
    proposal, logits = drafted(tree, batch)
    logits[1, -1, 3] = bad
    alone = step(tree, stubs([sampling]))
    assert verify_step(batch, proposal, logits) == [*alone, Accepted(())]


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("shape", ["chain", "static tree"])
def test_first_nodes_of_a_tree_are_verified_as_the_tree_of_these(
    shape: str, sampling: SamplingParams, garbage: float
) -> None:
    """No kernel promises what it leaves in the rows of the others."""
    tree = SHAPES[shape]
    for kept in range(1, tree.num_nodes):
        batch, (alone,) = stubs([SamplingParams(), sampling]), stubs([sampling])
        whole, found = step(tree, batch, [tree.num_nodes, kept], garbage)
        (expected,) = step(Tree(tree.parents[:kept], tree.ranks[:kept]), [alone])
        assert (found.tokens, found.draws) == (expected.tokens, expected.draws)
        assert len(whole.tokens) > 1


def test_sequences_with_the_same_filters_are_verified_at_once_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two kinds of filters, seeds and penalties of their own."""
    kinds = [SamplingParams(1.0, top_p=0.9, seed=seed) for seed in range(4)]
    kinds += [
        SamplingParams(1.0, top_p=0.9, seed=4, presence_penalty=0.7),
        SamplingParams(0.5, seed=5),
        SamplingParams(0.5, seed=6),
    ]
    seen: list[int] = []

    def watched(logits: Tensor, sampling: SamplingParams) -> Tensor:
        seen.append(len(logits))
        return _TARGET_PROBS(logits, sampling)

    monkeypatch.setattr(sampling_module, "target_probs", watched)
    answers = []
    num_nodes = TREE.num_nodes
    for most, groups in ((1 << 24, [5, 2]), (2 * num_nodes * VOCAB, [2, 2, 1, 2]), (1, [1] * 7)):
        monkeypatch.setattr(verify_module, "_MOST_PROBS", most)
        batch = stubs(kinds)
        seen.clear()
        step(TREE, batch)
        assert seen == [group * num_nodes for group in groups]
        for _ in range(10):
            step(TREE, batch)
        answers.append([s.tokens for s in batch])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(0.0, repetition_penalty=1.3, presence_penalty=0.8)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_emits_what_plain_python_does_penalties_or_not(
    shape: str, sampling: SamplingParams
) -> None:
    (stub,) = stubs([sampling], prompt=(3, 9, 9))
    while len(stub.tokens) < 60:
        step(SHAPES[shape], [stub])
    expected = [ROOT]
    while len(expected) < 60:
        logits = ref_penalised(TARGET[expected[-1]].tolist(), (3, 9, 9), expected, sampling)
        expected.append(logits.index(max(logits)))
    assert stub.tokens[:60] == expected
