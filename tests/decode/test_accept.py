"""Acceptance against a brute-force reading of its definition, and its exact distribution."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.decode.speculation import accept as accept_module
from trt_eagle3.decode.speculation.accept import Accepted, accept

Cycle = tuple[list[int], list[int], list[int]]


def never() -> float:
    raise AssertionError("greedy acceptance asked for a random number")


def accept_greedy(target: list[int], draft: list[int], parents: list[int]) -> Accepted:
    """``accept`` where the target is certain of its tokens."""
    probs = [float(target[parent] == token) for token, parent in zip(draft, parents, strict=True)]
    return accept(draft, parents, probs, target, never)


def ref_accept(target: list[int], draft: list[int], parents: list[int]) -> Accepted:
    """Of all root paths on which every token is what the target says after its parent, the
    longest; then the bonus.
    """
    best = (0,)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        agrees = all(draft[child] == target[parent] for parent, child in itertools.pairwise(path))
        if agrees and len(path) > len(best):
            best = tuple(path)
    return Accepted(best, (*(draft[node] for node in best[1:]), target[best[-1]]))


@st.composite
def cycles(draw: st.DrawFn, max_nodes: int = 14, max_vocab: int = 4) -> Cycle:
    """Target tokens, draft tokens and parents of a tree whose siblings differ, over very few
    tokens.
    """
    vocab = draw(st.integers(1, max_vocab))
    token = st.integers(0, vocab - 1)
    parents, draft = [-1], [draw(token)]
    for _ in range(draw(st.integers(0, max_nodes))):
        parent, word = draw(st.integers(0, len(parents) - 1)), draw(token)
        if (parent, word) not in zip(parents[1:], draft[1:], strict=True):
            parents.append(parent)
            draft.append(word)
    return draw(st.lists(token, min_size=len(parents), max_size=len(parents))), draft, parents


@given(cycle=cycles())
def test_certain_target_accepts_of_any_tree_the_longest_path_that_agrees(cycle: Cycle) -> None:
    assert accept_greedy(*cycle) == ref_accept(*cycle)


def test_accept_all_rejected_returns_only_the_bonus_token() -> None:
    assert accept_greedy([5, 1, 2], [9, 6, 7], [-1, 0, 0]) == Accepted((0,), (5,))


def test_accept_whole_chain_returns_it_and_the_bonus_token() -> None:
    assert accept_greedy([1, 2, 3], [9, 1, 2], [-1, 0, 1]) == Accepted((0, 1, 2), (1, 2, 3))


def test_accept_of_a_later_sibling_skips_the_others() -> None:
    target, draft, parents = [7, 0, 8, 0, 4], [9, 6, 7, 6, 8], [-1, 0, 0, 1, 2]
    assert accept_greedy(target, draft, parents) == Accepted((0, 2, 4), (7, 8, 4))


def test_accept_does_not_take_a_right_token_under_a_wrong_parent() -> None:
    assert accept_greedy([7, 7, 7], [9, 6, 7], [-1, 0, 1]) == Accepted((0,), (7,))


def test_accept_of_a_lone_root_is_plain_decoding() -> None:
    assert accept_greedy([3], [9], [-1]) == Accepted((0,), (3,))


def test_root_token_equal_to_the_target_token_is_not_its_own_child() -> None:
    assert accept_greedy([9, 0], [9, 4], [-1, 0]) == Accepted((0,), (9,))


_SHARES = 4
"""A node's target probabilities are multiples of 1/4, so that few random numbers stand for all:
see ``outcomes``.
"""


@st.composite
def accept_probs(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and parents of a tree of at most 6 nodes, and of each node the target's shares over
    3 tokens.
    """
    _, tokens, parents = draw(cycles(max_nodes=5, max_vocab=3))
    split = st.tuples(st.integers(0, _SHARES), st.integers(0, _SHARES)).map(sorted)
    cuts = draw(st.lists(split, min_size=len(tokens), max_size=len(tokens)))
    return tokens, parents, [[low, high - low, _SHARES - high] for low, high in cuts]


def outcomes(
    tokens: list[int], parents: list[int], probs: list[float]
) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    """Every path that ``accept`` can take, with its exact probability.

    ``accept`` is run with random numbers from a grid so fine that all numbers of a cell compare
    alike: what is left is 1 to 4 shares, so a threshold is a multiple of 1/12.
    """
    pending: list[list[float]] = [[]]
    while pending:
        given_numbers = pending.pop()
        try:
            found = accept(
                tokens, parents, probs, range(len(tokens)), partial(next, iter(given_numbers))
            )
        except StopIteration:
            pending += [[*given_numbers, (cell + 0.5) / 12] for cell in range(12)]
        else:
            yield Fraction(1, 12 ** len(given_numbers)), found.path


def emitted(
    tokens: list[int], parents: list[int], shares: list[list[int]]
) -> tuple[dict[tuple[int, ...], Fraction], dict[tuple[int, ...], Fraction]]:
    """Probability of each path of tokens with its bonus, as ``accept`` makes it; and how the target
    would say it.

    The bonus is the target's distribution at the last node without that node's children.
    """
    probs = [shares[parent][token] / _SHARES for token, parent in zip(tokens, parents, strict=True)]
    found: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    expected: dict[tuple[int, ...], Fraction] = {}
    for weight, path in outcomes(tokens, parents, probs):
        children = {tokens[node] for node, parent in enumerate(parents) if parent == path[-1]}
        left = {t: share for t, share in enumerate(shares[path[-1]]) if t not in children and share}
        assert left, "the walk ends where no token is left to say"
        for token, share in left.items():
            output_ids = (*(tokens[node] for node in path[1:]), token)
            found[output_ids] += weight * Fraction(share, sum(left.values()))
            truth = Fraction(1)
            for node, word in zip(path, output_ids, strict=True):
                truth *= Fraction(shares[node][word], _SHARES)
            expected[output_ids] = truth
    return found, expected


@given(case=accept_probs())
def test_what_is_emitted_has_exactly_the_targets_probability(
    case: tuple[list[int], list[int], list[list[int]]],
) -> None:
    found, expected = emitted(*case)
    assert found == expected
    assert sum(found.values()) == 1


UNEVEN = [0, 0, 1, 2, 0], [-1, 0, 0, 1, 1], [[1, 1, 2], [1, 1, 2], [2, 1, 1], [4, 0, 0], [0, 4, 0]]


def raw_sibling(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """A sibling is judged by its own probability, as if the ones before it had not been
    rejected.
    """
    for node in siblings:
        if uniform() < probs[node]:
            return int(node)
    return None


def likeliest_sibling(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """One chance for the best sibling, none for the others."""
    best = max(siblings, key=lambda node: probs[node], default=None)
    return best if best is not None and uniform() < probs[best] else None


def one_number_for_all(siblings: Any, probs: Any, uniform: Callable[[], float]) -> int | None:
    """All siblings are judged by one random number."""
    number, left = uniform() if siblings else 0.0, 1.0
    for node in siblings:
        if number * left < probs[node]:
            return int(node)
        left -= probs[node]
    return None


@pytest.mark.parametrize("rule", [raw_sibling, likeliest_sibling, one_number_for_all])
def test_biased_rule_is_caught(rule: Any, monkeypatch: Any) -> None:
    found, expected = emitted(*UNEVEN)
    assert found == expected
    monkeypatch.setattr(accept_module, "_chosen", rule)
    found, expected = emitted(*UNEVEN)
    assert found != expected


@pytest.mark.parametrize("guarded", [True, False])
def test_siblings_with_all_the_mass_leave_none_behind_in_spite_of_rounding(
    guarded: bool, monkeypatch: Any
) -> None:
    if not guarded:
        monkeypatch.setattr(accept_module, "ROUNDING", 0.0)
    probs = [0.0, 0.1, 0.3, 0.6]  # in float64, 1 - 0.1 - 0.3 is more than 0.6
    numbers = iter([0.99, 0.99, 1 - 2**-53])
    found = accept([9, 0, 1, 2], [-1, 0, 0, 0], probs, [5, 6, 7, 8], partial(next, numbers))
    assert (found.path == (0, 3)) == guarded


def test_token_of_no_probability_is_never_accepted_whatever_is_left() -> None:
    assert accept([9, 0, 1], [-1, 0, 0], [0.0, 0.0, 0.0], [5, 6, 7], lambda: 0.0) == Accepted(
        (0,), (5,)
    )
