"""Greedy acceptance against a brute-force reading of its definition."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.decode.accept import Accepted, accept_greedy


def ref_accept(target: list[int], draft: list[int], parents: list[int]) -> Accepted:
    """Of all root paths on which every token is what the target says after its parent, the longest; then the bonus."""
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
def cycles(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Target tokens, draft tokens and parents of a tree whose siblings differ, over very few tokens."""
    vocab = draw(st.integers(1, 4))
    token = st.integers(0, vocab - 1)
    parents, draft = [-1], [draw(token)]
    for _ in range(draw(st.integers(0, 14))):
        parent, word = draw(st.integers(0, len(parents) - 1)), draw(token)
        if (parent, word) not in zip(parents[1:], draft[1:], strict=True):
            parents.append(parent)
            draft.append(word)
    return draw(st.lists(token, min_size=len(parents), max_size=len(parents))), draft, parents


@given(cycle=cycles())
def test_accept_greedy_of_any_tree_is_the_longest_path_that_agrees(
    cycle: tuple[list[int], list[int], list[int]],
) -> None:
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
