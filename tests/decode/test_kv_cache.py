"""Pages and rows: none leaked, none owned twice, and compaction that moves rows as if at once."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trt_eagle3.decode.memory.kv_cache import BatchTable, KVCache, PagePool, PageTable
from trt_eagle3.errors import UserError
from trt_eagle3.spec import StateSpec

NUM_PAGES, PAGE_SIZE = 9, 3


def states(layers: int, heads: int, dim: int, dtype: str = "float32") -> list[StateSpec]:
    return [
        StateSpec(f"{side}_cache.{layer}", "paged", (heads, dim), dtype)
        for layer in range(layers)
        for side in "kv"
    ]


class Pages(RuleBasedStateMachine):
    """Sequences come, grow, shrink and go; every page but page 0 always has exactly one owner."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.alive: list[PageTable] = []

    @rule(target=tables)
    def come(self) -> PageTable:
        self.alive.append(PageTable(self.pool))
        return self.alive[-1]

    @rule(table=tables, num_rows=st.integers(0, 30))
    def grow(self, table: PageTable, num_rows: int) -> None:
        before, free = list(table.held), self.pool.num_free
        wanted = -(-num_rows // PAGE_SIZE) - len(before)
        if wanted > free:
            with pytest.raises(
                UserError, match=f"{wanted} more pages of 3 tokens wanted, {free} of 8 free"
            ):
                table.reserve(num_rows)
            assert list(table.held) == before
            return
        table.reserve(num_rows)
        assert list(table.held[: len(before)]) == before  # rows that are there stay where they are
        assert len(table.held) * PAGE_SIZE >= num_rows

    @rule(table=tables, num_rows=st.integers(0, 30))
    def shrink(self, table: PageTable, num_rows: int) -> None:
        before = list(table.held)
        table.truncate(num_rows)
        assert list(table.held) == before[: -(-num_rows // PAGE_SIZE)]

    @rule(table=consumes(tables))
    def go(self, table: PageTable) -> None:
        table.truncate(0)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for table in self.alive for page in table.held]
        assert len({*owned} & {*range(1, NUM_PAGES)}) == len(owned)
        assert self.pool.num_free == NUM_PAGES - 1 - len(owned)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=40, stateful_step_count=40)


def test_slots_and_pages_of_rows_follow_the_page_table() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    pool.take(pool.num_free)
    pool.give_back([5, 2, 7])  # as if freed in this order: 5 comes first
    table = PageTable(pool)
    table.reserve(7)
    assert table.pages(7).tolist() == [[5, 2, 7]]
    assert table.pages(6).tolist() == [[5, 2]]
    assert table.pages(1).dtype == torch.int32
    assert table.slots(torch.tensor([0, 2, 3, 5, 6])).tolist() == [15, 17, 6, 8, 21]


def test_page_table_of_fixed_length_holds_all_pages_then_page_0_and_follows_every_change() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len=5)
    table, other = PageTable(pool), PageTable(pool)
    table.reserve(7)
    assert table.pages(1).dtype == torch.int32
    assert [table.pages(rows).tolist() for rows in (1, 7)] == [[[1, 2, 3, 0, 0]]] * 2
    other.adopt(table.held[:1])
    assert other.pages(3).tolist() == [[1, 0, 0, 0, 0]]
    table.reserve(13)
    assert table.pages(13).tolist() == [[1, 2, 3, 4, 5]]
    table.truncate(4)
    assert table.pages(4).tolist() == [[1, 2, 0, 0, 0]]
    both = BatchTable("cpu").of([other, table], [3, 4])
    assert both.tolist() == [[1, 0, 0, 0, 0], [1, 2, 0, 0, 0]]


def test_page_table_of_a_batch_is_as_wide_as_its_longest_and_has_page_0_behind_the_others() -> None:
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    tables = [PageTable(pool) for _ in range(3)]
    for table, rows in zip(tables, (3, 9, 5), strict=True):
        table.reserve(rows)
    made = BatchTable("cpu").of(tables, [3, 9, 5])
    assert (made.dtype, made.tolist()) == (torch.int32, [[1, 0, 0], [2, 3, 4], [5, 6, 0]])
    assert BatchTable("cpu").of(tables[1:2], [4]).tolist() == [[2, 3]]


def rows_of(tables: list[PageTable], size: int, width: int) -> list[list[int]]:
    """What a page table of ``width`` says of ``tables``, padded to ``size``."""
    held = [list(table.held) for table in tables] + [[]] * (size - len(tables))
    return [pages + [0] * (width - len(pages)) for pages in held]


CHANGES = st.sampled_from(["grow", "join", "leave", "shrink", "pad"])


@given(st.lists(st.tuples(CHANGES, st.integers(0, 3))))
@settings(max_examples=60)
def test_batch_table_says_what_its_sequences_hold_and_leaves_older_ones_as_they_were(
    changes: list[tuple[str, int]],
) -> None:
    pool, size = PagePool(40, PAGE_SIZE, table_len=6), 4
    tables, device = [PageTable(pool)], BatchTable("cpu")
    tables[0].reserve(1)
    given_out = [(device.of(tables, [1], size), rows_of(tables, size, 6))]
    for change, which in changes:
        table = tables[which % len(tables)]
        if change == "grow":
            table.reserve(min(len(table.held) + 1, 6) * PAGE_SIZE)
        elif change == "join" and len(tables) < 4:
            tables.append(PageTable(pool))
            tables[-1].reserve(which * PAGE_SIZE + 1)
        elif change == "leave" and len(tables) > 1:
            tables.remove(table)
            table.truncate(0)
        elif change == "shrink":  # and perhaps other pages in their place
            table.truncate(PAGE_SIZE)
            table.reserve(which * PAGE_SIZE)
        size = 4 + which if change == "pad" else size
        given_out.append((device.of(tables, [1] * len(tables), size), rows_of(tables, size, 6)))
    for made, wanted in given_out:
        assert (made.dtype, made.tolist()) == (torch.int32, wanted)


def test_batch_table_whose_copy_failed_is_that_of_the_batch_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device had no memory for it; the batch before, which is smaller, goes on."""
    pool = PagePool(40, PAGE_SIZE, table_len=6)
    tables, batch = [PageTable(pool) for _ in range(4)], BatchTable("cpu")
    for table in tables:
        table.reserve(2 * PAGE_SIZE)
    batch.of(tables[:3], [1] * 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr("trt_eagle3.decode.memory.kv_cache.to_device", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            batch.of(tables, [1] * 4, 4)
    tables[1].reserve(3 * PAGE_SIZE)
    assert batch.of(tables[:3], [1] * 3, 4).tolist() == rows_of(tables[:3], 4, 6)


def test_sequence_with_more_pages_than_its_table_is_long_is_refused() -> None:
    """They would be written over the next sequence's."""
    pool = PagePool(40, PAGE_SIZE, table_len=2)
    tables = [PageTable(pool) for _ in range(2)]
    tables[0].reserve(3 * PAGE_SIZE)
    with pytest.raises(AssertionError, match="3 pages in a table of 2"):
        BatchTable("cpu").of(tables, [1, 1])


def test_fresh_pool_gives_low_pages_first_and_never_page_0() -> None:
    pool = PagePool(4, 16)
    assert pool.take(3) == [1, 2, 3]
    assert pool.num_free == 0


@given(
    path=st.lists(st.integers(0, 14), min_size=1, max_size=8, unique=True).map(sorted),
    past=st.integers(0, 9),
)
def test_move_of_an_accepted_path_equals_a_gather_and_touches_nothing_else(
    path: list[int], past: int
) -> None:
    cache = KVCache(states(2, 2, 3), NUM_PAGES * PAGE_SIZE)
    for _, buffer in cache.bindings():
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + buffer.data_ptr() % 1009)
    before = {name: buffer.clone() for name, buffer in cache.bindings()}
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    order = pool.take(8)
    pool.give_back(order[::-1])
    table = PageTable(pool)
    table.reserve(24)
    source, destination = (
        table.slots(past + torch.tensor(path)),
        table.slots(past + torch.arange(len(path))),
    )
    cache.move(source, destination)
    for name, buffer in cache.bindings():
        expected = before[name].clone()
        expected[destination] = before[name][source]
        assert torch.equal(buffer, expected)


def test_move_that_copies_row_by_row_in_the_wrong_order_is_caught() -> None:
    """A path is ascending, but pages are not: what stands at a destination may still be wanted."""
    cache = KVCache(states(1, 1, 1), 4)
    buffer = next(buffer for _, buffer in cache.bindings())
    buffer[:, 0, 0] = torch.arange(4.0)
    cache.move(torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert buffer.flatten().tolist() == [0, 2, 1, 3]
    one_by_one = torch.arange(4.0)
    for source, destination in ((1, 2), (2, 1)):
        one_by_one[destination] = one_by_one[source]
    assert buffer.flatten().tolist() != one_by_one.tolist()


def test_cache_binds_one_buffer_to_input_and_output_of_each_layer() -> None:
    cache = KVCache(states(2, 2, 4, "float16"), 12)
    bound = dict(cache.bindings())
    assert set(bound) == {
        f"{side}_cache{out}.{layer}" for side in "kv" for out in ("", "_out") for layer in range(2)
    }
    for side in "kv":
        for layer in range(2):
            assert (
                bound[f"{side}_cache.{layer}"].data_ptr()
                == bound[f"{side}_cache_out.{layer}"].data_ptr()
            )
    assert len({buffer.data_ptr() for buffer in bound.values()}) == 4
    assert all(buffer.is_contiguous() and buffer.shape == (12, 2, 4) for buffer in bound.values())
    assert cache.num_bytes == 2 * 2 * 12 * 2 * 4 * 2
    assert not any(buffer.any() for buffer in bound.values())


def test_cache_that_does_not_fit_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"KV cache: \d+\.\d GB for 16777216 tokens do not fit"
    ) as caught:
        KVCache(states(10**4, 64, 256), 2**24)
    assert "\n" not in str(caught.value)
