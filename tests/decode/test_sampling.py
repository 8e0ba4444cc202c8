"""Sampling: filters and penalties against plain Python, seeds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.decode.chi_square import FALSE_ALARM, p_value
from tests.decode.reference_sampling import edge_distance, ref_penalised, ref_probs
from trt_eagle3.decode.sampling import sampler as sampling_module
from trt_eagle3.decode.sampling.sampler import Sampler, VerifyResult, target_probs
from trt_eagle3.decode.sampling.sampling_params import GREEDY, SamplingParams
from trt_eagle3.decode.speculation.tree import Tree
from trt_eagle3.errors import UserError

FLOAT64_TOLERANCE = 1e-12
"""Of probabilities.

Origin: some hundred float64 roundings of 1e-16 each; the worst of 5,000 cases was 2.2e-16.
"""

VOCAB = 9
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])
NODES = torch.arange(TREE.num_nodes)


def sampler_of(sampling: SamplingParams, *prompt: int) -> Sampler:
    return Sampler(sampling, torch.tensor(prompt), VOCAB)


def verified(sampler: Sampler, logits: torch.Tensor, tokens: torch.Tensor = NODES) -> VerifyResult:
    """Of ``TREE``, whose node i has token i by default."""
    return sampler.verify(logits, tokens, torch.tensor(TREE.parents), TREE.mask)


def drawn_logits(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed))


@st.composite
def settings(draw: st.DrawFn) -> SamplingParams:
    temperatures = st.sampled_from([1e-3, 0.3, 1.0, 2.0, 100.0])
    return SamplingParams(
        temperature=draw(temperatures),
        top_k=draw(st.integers(0, VOCAB + 3)),
        top_p=draw(st.sampled_from([1e-9, 0.1, 0.5, 0.77, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.21, 1.0])),
    )


ROWS = st.lists(
    st.lists(st.integers(-6, 6).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    min_size=1,
    max_size=5,
)
"""Logits among which many tie."""


@given(rows=ROWS, sampling=settings())
def test_target_probs_of_any_logits_and_filters_equal_sort_and_scan(
    rows: list[list[float]], sampling: SamplingParams
) -> None:
    assume(all(edge_distance(row, sampling) > 1e-9 for row in rows))
    found = target_probs(torch.tensor(rows), sampling)
    expected = torch.tensor([ref_probs(row, sampling) for row in rows], dtype=torch.float64)
    assert found.dtype == torch.float64
    assert torch.equal(found > 0, expected > 0)
    assert float((found - expected).abs().max()) < FLOAT64_TOLERANCE


@pytest.mark.parametrize(
    ("logits", "sampling", "kept"),
    [
        ([1.0, 3.0, 3.0, 0.0], SamplingParams(1.0, top_k=1), [1, 2]),
        ([1.0, 3.0, 1.0, 0.0], SamplingParams(1.0, top_k=2), [0, 1, 2]),
        ([0.0, 0.0, 0.0, 0.0], SamplingParams(1.0, top_p=0.25), [0, 1, 2, 3]),
        ([5.0, 0.0, 0.0, -9.0], SamplingParams(1.0, top_p=0.99), [0, 1, 2]),
        ([0.0, 0.1, 0.0, -9.0], SamplingParams(1.0, top_p=0.0), [1]),
        ([0.0, 0.1, 0.0, -9.0], SamplingParams(1.0, top_p=0.0, top_k=3), [1]),
        ([5.0, 5.0, 0.0, -9.0], SamplingParams(1.0, min_p=1.0), [0, 1]),
        ([5.0, 4.0, 3.0, 2.0], SamplingParams(1.0, top_p=1e-9), [0]),
        ([5.0, 4.0, 3.0, 2.0], SamplingParams(1.0, top_k=4), [0, 1, 2, 3]),
        ([5.0, 4.0, 3.0, 2.0], SamplingParams(1.0, top_k=2**31 - 1), [0, 1, 2, 3]),
    ],
)
def test_tokens_at_the_edge_of_a_filter(
    logits: list[float], sampling: SamplingParams, kept: list[int]
) -> None:
    assert target_probs(torch.tensor([logits]), sampling)[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.9, 0.9999])
def test_top_p_of_a_large_vocabulary_is_as_if_all_were_sorted(
    scale: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From even rows, whose likeliest are too few, to peaked ones; ties at the edge among them."""
    drawn = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    logits = (drawn * scale).round(decimals=2)
    found = target_probs(logits, SamplingParams(1.0, top_p=top_p))
    monkeypatch.setattr(sampling_module, "_FEW", 5000)
    assert torch.equal(found, target_probs(logits, SamplingParams(1.0, top_p=top_p)))


def test_top_p_counts_of_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()  # after top_k 2: 4/7, 3/7
    found = target_probs(logits, SamplingParams(1.0, top_k=2, top_p=0.55))
    assert found.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert int((target_probs(logits, SamplingParams(1.0, top_p=0.55)) > 0).sum()) == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_temperature_near_zero_is_greedy_in_the_limit(temperature: float) -> None:
    found = target_probs(
        torch.tensor([[1.0, 3.5, -2.0], [1e30, 0.0, 1e30]]), SamplingParams(temperature)
    )
    assert found.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_that_are_not_finite_change_no_others(top_k: int, bad: float) -> None:
    sampling = SamplingParams(1.0, top_k=top_k, top_p=0.9)
    good, rows = drawn_logits(1, seed=0), drawn_logits(2, seed=0)
    rows[0, 3], rows[1] = bad, good
    assert torch.equal(target_probs(rows, sampling)[1:], target_probs(good, sampling))


def test_default_is_greedy() -> None:
    assert GREEDY.greedy
    assert not GREEDY.penalised
    assert not sampler_of(GREEDY, 1).needs_probs
    assert sampler_of(SamplingParams(presence_penalty=1.0), 1).needs_probs
    assert target_probs(torch.tensor([[1.0, 3.0, 3.0]]), GREEDY).tolist() == [[0.0, 1.0, 0.0]]


# Penalties, per node in path order


@st.composite
def penalised(
    draw: st.DrawFn,
) -> tuple[SamplingParams, list[int], list[int], list[int], torch.Tensor]:
    """Penalties, prompt, answer (its last token is the root), tokens at the nodes of TREE,
    logits.
    """
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([-0.7, 0.0, 0.9])),
        seed=0,
    )
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
    prompt, answer = draw(tokens), draw(tokens)
    nodes = [answer[-1], *draw(st.lists(st.integers(0, VOCAB - 1), min_size=8, max_size=8))]
    logits = drawn_logits(TREE.num_nodes, seed=draw(st.integers(0, 99)))
    return sampling, prompt, answer, nodes, logits


def test_penalties_of_a_tree_are_those_of_each_path_alone(monkeypatch: Any) -> None:
    seen: list[torch.Tensor] = []
    process = sampling_module.process_logits

    def watched(*args: Any) -> torch.Tensor:
        changed: torch.Tensor = process(*args)
        seen.append(changed.flatten(0, 1))
        return changed

    monkeypatch.setattr(sampling_module, "process_logits", watched)

    @given(case=penalised())
    def check(case: tuple[SamplingParams, list[int], list[int], list[int], torch.Tensor]) -> None:
        sampling, prompt, answer, nodes, logits = case
        sampler = sampler_of(sampling, *prompt)
        sampler.first(logits[0])
        sampler.remember(answer[:1])
        sampler.remember(answer[1:])
        before = logits.clone()
        verified(sampler, logits, torch.tensor(nodes))
        assert torch.equal(logits, before), "the target's logits were overwritten"
        paths = [torch.tensor(nodes)[mask].tolist() for mask in TREE.mask]
        expected = [
            ref_penalised(row, prompt, answer + path, sampling)
            for row, path in zip(logits, paths, strict=True)
        ]
        torch.testing.assert_close(seen[-1], torch.tensor(expected), rtol=1e-6, atol=1e-6)

    check()


@pytest.mark.parametrize(
    "mask",
    [torch.eye(TREE.num_nodes).bool(), torch.ones(TREE.num_nodes, TREE.num_nodes).tril().bool()],
)
def test_penalties_by_a_wrong_mask_are_caught(mask: torch.Tensor) -> None:
    def bonus(mask: torch.Tensor) -> list[int]:
        sampler = sampler_of(SamplingParams(0.0, presence_penalty=50.0), 0)
        sampler.remember([0])  # the root
        logits = torch.arange(VOCAB).expand(TREE.num_nodes, -1) * -1.0
        return sampler.verify(logits, NODES, torch.tensor(TREE.parents), mask).bonus.tolist()

    # the least token that is not on the path
    assert bonus(TREE.mask) == [1, 2, 1, 1, 2, 2, 1, 2, 2]
    assert bonus(mask) != bonus(TREE.mask)


def test_image_tokens_of_a_prompt_and_tokens_of_the_answer_count() -> None:
    sampler = sampler_of(SamplingParams(0.0, repetition_penalty=2.0, presence_penalty=1.0), 5, 5, 5)
    logits = torch.tensor([4.0, 3.9, 3.8, 0.0, 0.0, 4.1, 0.0, 0.0, 0.0])
    output_ids = []
    for _ in range(4):
        output_ids.append(int(sampler.first(logits)))
        sampler.remember(output_ids[-1:])
    # 5 is worth 2.05 at first; then 0 to 2 are worth 1, 0.95, 0.9, and 5 again 1.05
    assert output_ids == [0, 1, 2, 5]


# Random numbers


def bonus_tokens(seed: int | None) -> list[list[int]]:
    sampler = sampler_of(SamplingParams(1.0, seed=seed), 1)
    logits = drawn_logits(20, TREE.num_nodes, seed=0)
    return [verified(sampler, tree).bonus.tolist() for tree in logits]


def test_same_seed_gives_the_same_tokens_and_others_do_not() -> None:
    assert bonus_tokens(7) == bonus_tokens(7)
    assert bonus_tokens(7) != bonus_tokens(8)
    assert bonus_tokens(0) != bonus_tokens(2**64 - 1)
    assert bonus_tokens(None) != bonus_tokens(None)


def test_seeds_leave_torchs_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    bonus_tokens(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_first_token_has_the_targets_probabilities() -> None:
    sampling = SamplingParams(0.7, top_k=6, top_p=0.95, repetition_penalty=1.3, seed=3)
    logits, sampler = drawn_logits(seed=1), sampler_of(sampling, 1, 4)
    drawn = torch.stack([sampler.first(logits) for _ in range(2000)])
    counts = torch.bincount(drawn, minlength=VOCAB)
    exact = ref_probs(ref_penalised(logits.tolist(), [1, 4], [], sampling), sampling)
    assert p_value(counts, torch.tensor(exact, dtype=torch.float64)) > FALSE_ALARM


def test_greedy_draws_no_random_number(monkeypatch: Any) -> None:
    monkeypatch.delattr(Sampler, "upcoming")
    sampler = sampler_of(SamplingParams(0.0, presence_penalty=0.5), 1)
    found = verified(sampler, drawn_logits(TREE.num_nodes, seed=1))
    assert set(found.accept.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_bonus_is_never_a_token_without_probability_nor_a_child(
    number: float, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Sampler, "uniform", lambda _: number)
    sampler = sampler_of(SamplingParams(1.0, top_k=5), 0)
    for seed in range(30):  # node i has token i, so 1, 2 and 3 must not follow node 0
        logits = drawn_logits(TREE.num_nodes, seed=seed)
        bonus, probs = verified(sampler, logits).bonus, target_probs(logits, sampler.sampling)
        for i in range(TREE.num_nodes):
            children = [child for child, parent in enumerate(TREE.parents) if parent == i]
            left = probs[i].clone()
            left[children] = 0.0
            assert float(left.sum()) == 0.0 or float(left[bonus[i]]) > 0.0


def test_uniform_numbers_are_below_one_and_fill_the_interval() -> None:
    sampler = sampler_of(SamplingParams(1.0, seed=0), 0)
    numbers = torch.tensor([sampler.uniform() for _ in range(4000)], dtype=torch.float64)
    counts = torch.histc(numbers, 16, 0.0, 1.0).long()
    assert p_value(counts, torch.full((16,), 1 / 16, dtype=torch.float64)) > FALSE_ALARM
    assert float(numbers.max()) < 1.0


# What is refused

NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]
WHOLE = ["top_k", "seed"]
NO_NUMBERS: list[Any] = [True, False, "1", None, [1.0], 1j, b"1", {}, "a\nb" * 30]
NO_NUMBERS += [math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000]
NO_NUMBERS += [np.zeros((2, 2)), torch.zeros(2, 2), torch.ones(()), np.float32(0.5)]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", NUMBERS + WHOLE)
def test_what_is_no_finite_number_is_refused_by_name_in_one_line(name: str, value: Any) -> None:
    if name == "seed" and value is None:
        return
    message = f"^{name}: expected a (whole )?number (from|above) .*, got "
    with pytest.raises(UserError, match=message) as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 160


BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, -0.0, 1, 100.0, np.float64(0.5)], [-0.1, -5e-324, 100.1]),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31, 1.0, 0.5]),
    "top_p": ([0, 0.0, 1e-9, 1, 1.0], [-1e-9, -0.5, 1.0000001]),
    "min_p": ([0, 0.0, 1.0], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 1, 100.0], [0.0, 0.001, -1, 101]),
    "presence_penalty": ([-100, 0, 100.0], [-101, 100.5]),
    "seed": ([None, 0, 2**64 - 1], [-1, 2**64, 1.5]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_each_value(name: str) -> None:
    taken, refused = BOUNDS[name]
    for value in taken:
        sampler = sampler_of(SamplingParams(**{"temperature": 1.0, name: value}), 0)
        sampler.first(torch.zeros(VOCAB))
    for value in refused:
        with pytest.raises(UserError, match=f"^{name}: expected"):
            SamplingParams(**{name: value})
