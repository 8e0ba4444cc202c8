"""Dynamic trees against a brute-force builder, over a draft whose logits are a table by path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.decode.table import Path, TableDraft, brute_force, paths_of
from trt_eagle3.decode.speculation import grow as grow_module
from trt_eagle3.decode.speculation.dynamic_tree import Candidates, DynamicTree, Frontier, ancestors
from trt_eagle3.decode.speculation.grow import TreeGrower
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import Tree

DRAFT_VOCAB, SHIFT = 6, 100


@dataclass(frozen=True)
class Case:
    """A batch over a table of few different rows, so that scores tie all the time.

    ``salt``: which path has which.
    """

    tree: DynamicTree
    rows: Tensor
    salt: int
    num_rows: tuple[int, ...]
    positions: tuple[int, ...]

    def table(self, b: int, path: Path) -> Tensor:
        """Logits f32 [Vd]."""
        return self.rows[hash((self.salt, b, *path)) % len(self.rows)]

    def propose(self, tree: DynamicTree | Tree) -> Proposal:
        draft = TableDraft(self.table, self.num_rows, self.positions, SHIFT)
        roots = [10 + b for b in range(len(self.num_rows))]
        made = TreeGrower(draft).grow(tree, draft.inputs(roots))
        assert draft.rows_run == tree.num_draft_rows
        return made


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = 1 + topk + (steps - 1) * topk * topk
    # tokens of one row never tie: see topk
    levels = st.permutations([0.5 * i for i in range(DRAFT_VOCAB)])
    rows = torch.tensor(draw(st.lists(levels, min_size=1, max_size=3)))
    batch = draw(st.integers(1, 3))
    numbers = st.lists(st.integers(1, 50), min_size=batch, max_size=batch)
    return Case(
        DynamicTree(steps, topk, draw(st.integers(2, most))),
        rows * draw(st.sampled_from([0.0625, 1.0, 8.0])),
        draw(st.integers(0, 1000)),
        tuple(draw(numbers)),
        tuple(draw(numbers)),
    )


def check(case: Case) -> None:
    """What is proposed is what brute force builds, and all that follows from parents agrees with
    them.
    """
    made = case.propose(case.tree)
    for b in range(len(case.num_rows)):
        paths = paths_of(made.tokens[b], made.parents[b])
        assert paths == brute_force(case.table, b, case.tree, SHIFT)
        assert int(made.tokens[b, 0]) == 10 + b
        assert int(made.parents[b, 0]) == -1
        assert made.depths[b].tolist() == [0, *map(len, paths)]
        of_node = [(), *paths]
        expected = [[above == path[: len(above)] for above in of_node] for path in of_node]
        assert made.mask[b].tolist() == expected


def check_all(cases: list[Case]) -> None:
    for case in cases:
        check(case)


@given(case=cases())
def test_dynamic_tree_of_any_table_is_what_brute_force_builds(case: Case) -> None:
    check(case)


@given(case=cases())
def test_static_tree_takes_the_ranks_of_its_shape_after_every_path(case: Case) -> None:
    paths = [(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 0, 0), (2, 3, 1)]
    made = case.propose(Tree.from_paths(paths))
    for b in range(len(case.num_rows)):
        expected: dict[Path, Path] = {(): ()}
        for path in sorted(paths, key=lambda path: (len(path), path)):
            above = expected[path[:-1]]
            token = int(case.table(b, above).argsort(descending=True)[path[-1]]) + SHIFT
            expected[path] = (*above, token)
        assert paths_of(made.tokens[b], made.parents[b]) == list(expected.values())[1:]


EQUAL = Case(DynamicTree(3, 3, 9), -32.0 * torch.arange(DRAFT_VOCAB)[None], 0, (5, 9), (5, 3))
"""Every path is followed by the same log-probabilities, exactly 0, -32, -64, ...: a score
depends on the ranks' sum.
"""
ROWS = torch.tensor([[0.0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 5, 0, 4, 2, 3]])
VARIED = [Case(DynamicTree(4, 3, 16), ROWS, salt, (5, 9), (5, 3)) for salt in range(5)]


def test_of_nodes_that_tie_the_earlier_is_kept() -> None:
    # and not (1, 0, 0)
    sums = {0: [(0,), (0, 0), (0, 0, 0)], 1: [(1,), (0, 1), (1, 0), (0, 0, 1), (0, 1, 0)]}
    made = EQUAL.propose(EQUAL.tree)
    kept = [
        tuple(token - SHIFT for token in path) for path in paths_of(made.tokens[0], made.parents[0])
    ]
    assert kept == sorted([*sums[0], *sums[1]], key=lambda path: (len(path), path))
    check(EQUAL)


def test_ties_do_occur_in_these_tests() -> None:
    def swapped(scores: Tensor, count: int) -> Tensor:
        """The later of equals first."""
        n = scores.shape[1]
        return n - 1 - scores.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :count]

    best = "trt_eagle3.decode.speculation.dynamic_tree._best"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, swapped)
        with pytest.raises(AssertionError):
            check(EQUAL)


@pytest.mark.parametrize("num_nodes", range(2, 23))
def test_every_budget_keeps_the_tree_of_the_one_before_and_one_node_more(num_nodes: int) -> None:
    trees = [replace(EQUAL.tree, num_nodes=n) for n in (num_nodes - 1, num_nodes)]
    smaller, larger = (
        set(paths_of(made.tokens[0], made.parents[0]))
        for made in (EQUAL.propose(tree) for tree in trees)
    )
    assert smaller < larger
    assert len(larger) == num_nodes - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [(), (100,)])
def test_draft_that_overflows_still_proposes_a_tree(bad: float, where: Path) -> None:
    """What it proposes is worth nothing, but verification goes on."""
    rows = torch.stack([EQUAL.rows[0], torch.full((DRAFT_VOCAB,), bad)])

    def table(_: int, path: Path) -> Tensor:
        return rows[int(path == where)]

    draft = TableDraft(table, EQUAL.num_rows, EQUAL.positions, SHIFT)
    made = TreeGrower(draft).grow(EQUAL.tree, draft.inputs([10, 11]))
    for b in range(2):
        paths = paths_of(made.tokens[b], made.parents[b])
        assert len(set(paths)) == 8
        assert made.depths[b].tolist() == [0, *map(len, paths)]


def test_ancestors_of_a_path_as_long_as_the_depth() -> None:
    chain = torch.arange(-1, 4)[None]
    assert torch.equal(ancestors(chain, 4)[0], torch.ones(5, 5).tril().bool())
    assert not torch.equal(ancestors(chain, 2)[0], torch.ones(5, 5).tril().bool())


def feed_first_parent(patch: Any) -> None:
    """Every row is fed the features of the level's best node."""
    first, add = Candidates.first, Candidates.add

    def wrong(frontier: Frontier) -> Frontier:
        return replace(frontier, parents=torch.zeros_like(frontier.parents))

    patch.setattr(Candidates, "first", lambda self: wrong(first(self)))
    patch.setattr(Candidates, "add", lambda self, *args: wrong(add(self, *args)))


def wrong_place(**changes: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A level runs with fields of its place changed."""

    def plant(patch: Any) -> None:
        def metadata(**fields: Any) -> Any:
            return original(
                **{**fields, **{name: change(fields[name]) for name, change in changes.items()}}
            )

        original = grow_module.AttentionMetadata
        patch.setattr(grow_module, "AttentionMetadata", metadata)

    return plant


def keep_without_parents(patch: Any) -> None:
    """The best nodes by their own log-probability, not their path's."""
    add = Candidates.add

    def wrong(self: Candidates, above: Frontier, tokens: Tensor, log_probs: Tensor) -> Frontier:
        return add(self, replace(above, scores=torch.zeros_like(above.scores)), tokens, log_probs)

    patch.setattr(Candidates, "add", wrong)


def forget_candidates(patch: Any) -> None:
    """Only what grew on can be kept, not what was considered beside it."""
    keep = Candidates.keep

    def wrong(self: Candidates, count: int) -> tuple[Tensor, Tensor]:
        self._scores[-1] = torch.full_like(self._scores[-1], -torch.inf)
        return keep(self, count)

    patch.setattr(Candidates, "keep", wrong)


FAULTS: dict[str, Callable[[Any], None]] = {
    "features of another parent": feed_first_parent,
    "mask lost": wrong_place(mask=torch.ones_like),
    "mask without ancestors": wrong_place(
        mask=lambda mask: torch.eye(mask.shape[1]).bool().expand_as(mask[..., -3:])
    ),
    "rows of a level overwrite those above": wrong_place(past=lambda past: past + 1),
    "rope position stands still": wrong_place(
        positions=lambda p: p - p + torch.tensor([5, 3])[:, None]
    ),
    "nodes scored without their path": keep_without_parents,
    "last level forgotten": forget_candidates,
    "ancestors not followed to the root": lambda patch: patch.setattr(
        grow_module, "ancestors", lambda parents, _: ancestors(parents, 1)
    ),
    "d2t ignored": lambda patch: patch.setattr(TableDraft, "target_ids", lambda _, ids: ids),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_growing_is_caught(fault: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises((AssertionError, KeyError)):
            check_all(VARIED)
    check_all(VARIED)
