"""Trees to choose from: sizes, cuts of the configured tree, levels."""

from __future__ import annotations

import pytest

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.policy.candidate import candidate_sizes, candidates_of, levels_of, shrunk
from trt_eagle3.decode.speculation.dynamic_tree import DynamicTree
from trt_eagle3.decode.speculation.tree import Tree, configured_tree

CHAIN = SpeculationConfig(mode="chain", steps=4)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(2, [1, 2]), (6, [1, 2, 3, 4, 6]), (16, [1, 2, 3, 4, 6, 8, 12, 16]), (7, [1, 2, 3, 4, 6, 7])],
)
def test_sizes_run_from_no_tree_to_the_configured_one(most: int, expected: list[int]) -> None:
    assert candidate_sizes(most) == expected


def test_candidates_begin_with_none_and_end_with_the_configured_tree() -> None:
    found = candidates_of(CHAIN)
    assert found[0].tree is None
    assert found[-1].tree == configured_tree(CHAIN)
    assert [c.num_nodes for c in found] == [1, 2, 3, 4, 5]


def test_shrunk_dynamic_tree_is_no_deeper_than_its_nodes() -> None:
    config = SpeculationConfig(mode="dynamic", steps=5, topk=3, num_draft_tokens=12)
    assert shrunk(config, 3) == DynamicTree(2, 3, 3)


def test_levels_are_depths_and_siblings_on_the_likeliest_path() -> None:
    assert levels_of(None) == ()
    assert levels_of(configured_tree(CHAIN)) == ((1, 1), (2, 1), (3, 1), (4, 1))
    bushy = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
    assert levels_of(bushy) == ((1, 3), (2, 2))
    assert levels_of(DynamicTree(3, 4, 10)) == ((1, 3), (2, 3), (3, 3))
