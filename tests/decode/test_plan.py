"""Speculation that knows when to stop: the table of a bundle, and decoding with it off and on
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import MAX_TOKENS, finish, make_scheduler, pair, prompts, solo
from tests.decode.table import brute_force
from tests.decode.test_decoder import BUSHY, CHAIN
from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.dynamic_tree import DynamicTree
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.plan import plan_of, read_plan, shrunk
from trt_eagle3.decode.prefix_cache import PrefixCache
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.tree import Tree, static_tree
from trt_eagle3.decode.tuning import TUNING_FILE, TuningEntry, TuningTable
from trt_eagle3.engine.machine import machine_name
from trt_eagle3.errors import UserError

CONFIG = SpeculationConfig(mode="chain", steps=5)


def table(
    sizes: dict[int, int], *, machine: str | None = None, config: SpeculationConfig = CONFIG
) -> TuningTable:
    entries = [
        TuningEntry(
            batch_size=size, num_draft_tokens=tokens, tokens_per_second={1: 1.0}, cycle_ms={1: 1.0}
        )
        for size, tokens in sizes.items()
    ]
    return TuningTable(
        measured_at="2026-11-21T00:00:00+00:00",
        machine=machine or machine_name("cpu"),
        speculation=config,
        acceptance={6: (0.9, 0.8)},
        entries=tuple(entries),
    )


def write(folder: Path, text: str) -> None:
    (folder / TUNING_FILE).write_text(text)


def test_bundle_without_a_table_speculates_as_configured(tmp_path: Path) -> None:
    plan = read_plan(tmp_path, CONFIG, "cpu")
    assert [tree.num_nodes for size in (1, 8) if (tree := plan.tree_at(size))] == [6, 6]


def test_batch_size_between_measured_ones_goes_by_the_next_larger(tmp_path: Path) -> None:
    write(tmp_path, table({4: 3, 1: 6, 8: 1}).model_dump_json())
    plan = read_plan(tmp_path, CONFIG, "cpu")
    trees = [plan.tree_at(size) for size in (1, 2, 4, 5, 8, 9)]
    assert [tree.num_nodes if tree else 1 for tree in trees] == [6, 3, 3, 1, 1, 1]
    assert plan.speculates
    assert not plan_of(table({1: 1, 8: 1})).speculates


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "damaged"),
        (table({1: 6}).model_dump_json().replace('"entries":[', '"entries":[7,'), "damaged"),
        (table({1: 6}, config=SpeculationConfig(steps=4)).model_dump_json(), "another speculation"),
        (table({1: 60}).model_dump_json(), "another speculation"),
        (
            table({1: 6}).model_dump_json().replace('"num_draft_tokens":6', '"num_draft_tokens":0'),
            "damaged",
        ),
        (
            table({1: 6}).model_dump_json().replace('"entries":[', '"surplus":1,"entries":['),
            "damaged",
        ),
        (
            table({1: 6}).model_dump_json().replace('"schema_version":1', '"schema_version":2'),
            "damaged",
        ),
    ],
)
def test_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, text)
    with pytest.raises(UserError, match=rf"{reason}.*bench .* --tune") as error:
        read_plan(tmp_path, CONFIG, "cpu")
    assert "\n" not in str(error.value)


def test_folder_in_place_of_the_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / TUNING_FILE).mkdir()
    with pytest.raises(UserError, match="a damaged table"):
        read_plan(tmp_path, CONFIG, "cpu")


def test_table_of_another_machine_counts_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, table({1: 1}, machine="a mainframe").model_dump_json())
    with caplog.at_level(logging.WARNING, "trt_eagle3"):
        assert read_plan(tmp_path, CONFIG, "cpu").tree_at(1) is None
    assert "a mainframe" in caplog.text


@pytest.mark.parametrize("count", range(2, 9))
def test_shrunk_trees_have_so_many_nodes_and_no_more_levels_than_they_can_fill(count: int) -> None:
    configs = [
        SpeculationConfig(mode="chain", steps=7),
        SpeculationConfig(mode="tree", steps=3, topk=3, num_draft_tokens=8),
        SpeculationConfig(mode="dynamic", steps=3, topk=3, num_draft_tokens=8),
    ]
    for config in configs:
        tree = shrunk(config, count)
        assert tree is not None
        assert tree.num_nodes == count
        assert tree.steps <= min(config.steps, count - 1)
        if isinstance(tree, DynamicTree):
            SpeculationConfig(
                mode="dynamic", steps=tree.steps, topk=tree.topk, num_draft_tokens=count
            )
    assert shrunk(configs[0], 1) is None
    assert shrunk(configs[0], count) == static_tree(
        SpeculationConfig(mode="chain", steps=count - 1)
    )


def test_shrunk_static_trees_are_each_the_one_before_and_one_node_more() -> None:
    # as a user may write them: some ranks are missing
    paths = ((2,), (0,), (1,), (0, 1), (0, 1, 0), (2, 0), (0, 0))
    whole = SpeculationConfig(mode="tree", tree=paths)
    trees = [shrunk(whole, count) for count in range(2, 9)]
    kept = [set(tree.paths) for tree in trees if isinstance(tree, Tree)]
    assert [len(paths) for paths in kept] == list(range(1, 8))
    assert all(fewer < more for fewer, more in pairwise(kept))
    assert kept[-1] == set(paths)


@settings(max_examples=50)
@given(salt=st.integers(0, 1000), steps=st.integers(1, 4), topk=st.integers(1, 4), data=st.data())
def test_shrunk_dynamic_tree_is_what_is_best_of_the_whole_one(
    salt: int, steps: int, topk: int, data: Any
) -> None:
    """Fewer levels are grown, and nothing is lost by that."""
    count = data.draw(st.integers(2, 1 + topk + (steps - 1) * topk**2))
    config = SpeculationConfig(mode="dynamic", steps=steps, topk=topk)
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(salt))

    def logits(_: int, path: tuple[int, ...]) -> torch.Tensor:
        return rows[hash((salt, *path)) % 3]

    tree = shrunk(config, count)
    assert isinstance(tree, DynamicTree)
    assert brute_force(logits, 0, tree) == brute_force(logits, 0, replace(tree, steps=steps))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("run_of", [1, 2, 5, 9])  # 9: more than a prefill chunk
def test_speculation_off_and_on_again_says_the_same_and_asks_the_draft_again(
    run_of: int, cached: bool
) -> None:
    for index in range(len(prompts())):
        solo(index)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    calls = 0

    def tree_for(_: Sequence[SequenceState]) -> AnyTree | None:
        nonlocal calls
        calls += 1
        return (None, CHAIN, None, BUSHY)[calls // run_of % 4]

    scheduler = make_scheduler(pool, PrefixCache(pool) if cached else None, tree_for)
    asked = {index: pair().sequence(prompts()[index], pool, drafting=True) for index in (0, 1)}
    for sequence in asked.values():
        scheduler.add(sequence)
    output_ids = finish(scheduler)
    assert {i: output_ids[id(s)][:MAX_TOKENS] for i, s in asked.items()} == {
        i: solo(i) for i in asked
    }


def drafts(
    tree_for: Callable[[Sequence[SequenceState]], AnyTree | None],
) -> dict[int, torch.Tensor]:
    """The draft's logits by the rows that it holds, after every step."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(pool, None, tree_for)
    sequence = pair().sequence(prompts()[0], pool, drafting=True)
    scheduler.add(sequence)
    found = {}
    while len(sequence.tokens) < MAX_TOKENS:
        scheduler.step()
        if sequence.draft is not None:
            found[sequence.draft.length] = sequence.draft.logits
    return found


def test_draft_that_caught_up_knows_what_it_would_have_known() -> None:
    solo(0)
    trees = cycle([None, None, None, CHAIN])
    always, late = drafts(lambda _: CHAIN), drafts(lambda _: next(trees))
    both = sorted(always.keys() & late.keys())
    assert len(both) >= 3
    for length in both:  # float32, rows in other batches
        torch.testing.assert_close(late[length], always[length], atol=1e-4, rtol=1e-4)
