"""Trees: what a config describes, and what follows from parents."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import Tree, best_first_paths, configured_tree, static_tree
from trt_eagle3.errors import UserError


@st.composite
def path_sets(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Rank paths, each with its parent, in any order; ranks may skip."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(1, 12))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 4)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths[1:]))


@given(paths=path_sets())
def test_tree_of_any_paths_holds_each_with_its_ancestors(paths: list[tuple[int, ...]]) -> None:
    tree = Tree.from_paths(paths)
    assert tree.num_nodes == len(paths) + 1
    of_node: list[tuple[int, ...]] = [()]
    for i in range(1, tree.num_nodes):
        assert tree.parents[i] < i
        of_node.append((*of_node[tree.parents[i]], tree.ranks[i]))
    assert sorted(of_node[1:]) == sorted(paths)
    assert tree.paths == of_node[1:]
    assert tree.depths.tolist() == [len(path) for path in of_node]
    for i, j in itertools.product(range(tree.num_nodes), repeat=2):
        assert bool(tree.mask[i, j]) == (of_node[i][: len(of_node[j])] == of_node[j])
    assert [i for level in tree.levels for i in level] == list(range(1, tree.num_nodes))
    assert all(
        len(of_node[i]) == depth for depth, level in enumerate(tree.levels, start=1) for i in level
    )


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], r"path \[1, 0\] has no parent \[1\] in the tree"),
        ([(0, 0)], r"path \[0, 0\] has no parent \[0\]"),
        ([(0,), (0,)], "a path is given twice"),
        ([()], r"path \[\] has no parent|given twice"),
    ],
)
def test_tree_refuses_paths_that_make_no_tree(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tree.from_paths(paths)


@pytest.mark.parametrize("steps", [1, 5])
def test_chain_of_steps_is_a_lower_triangle(steps: int) -> None:
    tree = static_tree(SpeculationConfig(mode="chain", steps=steps))
    assert tree.parents == tuple(range(-1, steps))
    assert tree.ranks == (0,) * (steps + 1), "a chain is the draft's best tokens"
    assert torch.equal(tree.mask, torch.ones(steps + 1, steps + 1).tril().bool())
    assert tree.levels == tuple((i,) for i in range(1, steps + 1))


def test_root_only_is_a_tree_of_one_node() -> None:
    tree = Tree.root_only()
    assert (tree.parents, tree.ranks, tree.num_draft_rows) == ((-1,), (0,), 0)
    assert (tree.num_nodes, tree.mask.tolist(), tree.depths.tolist()) == (1, [[True]], [0])


def test_static_tree_takes_the_paths_of_the_config() -> None:
    tree = static_tree(SpeculationConfig(mode="tree", tree=((1,), (0,), (1, 0))))
    assert (tree.parents, tree.ranks) == ((-1, 0, 0, 2), (0, 0, 1, 0))


@pytest.mark.parametrize(
    ("steps", "topk", "tokens"), [(3, 2, 9), (2, 4, 13), (4, 3, None), (6, 4, 16), (1, 1, 2)]
)
def test_static_tree_without_paths_has_the_tokens_steps_and_topk_asked_for(
    steps: int, topk: int, tokens: int | None
) -> None:
    tree = static_tree(
        SpeculationConfig(mode="tree", steps=steps, topk=topk, num_draft_tokens=tokens)
    )
    assert tree.num_nodes == (tokens or steps * topk + 1)
    assert len(tree.levels) <= steps
    assert max(tree.ranks) < topk


@pytest.mark.parametrize(("tokens", "expected"), [(None, 16), (9, 9)])
def test_configured_dynamic_tree_has_the_tokens_steps_and_topk_asked_for(
    tokens: int | None, expected: int
) -> None:
    config = SpeculationConfig(mode="dynamic", steps=5, topk=3, num_draft_tokens=tokens)
    assert configured_tree(config) == DynamicTree(5, 3, expected)


def test_configured_tree_is_static_unless_it_is_to_be_dynamic() -> None:
    for config in (
        SpeculationConfig(mode="chain", steps=2),
        SpeculationConfig(mode="tree", steps=2, topk=2),
    ):
        assert configured_tree(config) == static_tree(config)


def ref_best_paths(steps: int, topk: int, count: int) -> set[tuple[int, ...]]:
    """By brute force: all paths, likeliest first, under the prior that the docstring states."""
    everything = [
        path for n in range(1, steps + 1) for path in itertools.product(range(topk), repeat=n)
    ]
    odds = {path: math.prod(0.7 / (rank + 1) ** 2 for rank in path) for path in everything}
    return set(sorted(everything, key=lambda path: -odds[path])[:count])


@pytest.mark.parametrize(("steps", "topk", "count"), [(3, 3, 4), (3, 3, 39), (4, 2, 12), (2, 5, 1)])
def test_best_first_paths_are_the_likeliest_and_closed_under_parents(
    steps: int, topk: int, count: int
) -> None:
    paths = best_first_paths(steps, topk, count)
    assert len(set(paths)) == count
    odds = [round(math.prod(0.7 / (rank + 1) ** 2 for rank in path), 12) for path in paths]
    expected = [
        round(math.prod(0.7 / (r + 1) ** 2 for r in path), 12)
        for path in ref_best_paths(steps, topk, count)
    ]
    assert sorted(odds) == sorted(expected)
    assert all(len(path) == 1 or path[:-1] in paths for path in paths)


def test_static_tree_refuses_more_tokens_than_steps_and_topk_can_make() -> None:
    with pytest.raises(UserError, match=r"2 steps of topk 2 make at most 7 nodes, got 8"):
        static_tree(SpeculationConfig(mode="tree", steps=2, topk=2, num_draft_tokens=8))


def test_mask_that_forgets_the_grandparents_is_caught() -> None:
    tree = Tree.from_paths([(0,), (0, 0), (0, 0, 0)])
    only_parents = torch.eye(4, dtype=torch.bool)
    for i, parent in enumerate(tree.parents[1:], start=1):
        only_parents[i, parent] = True
    assert not torch.equal(tree.mask, only_parents)
