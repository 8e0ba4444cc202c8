"""Paged KV: page ownership, the cache buffers, and row moves outside the graphs.

Target and draft hold the same number of rows per sequence, so they share one page table. Page 0
belongs to no sequence: padding rows write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.state_moves import move_rows
from trt_eagle3.errors import UserError
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = ["BatchTable", "KVCache", "PagePool", "PageTable"]


class PagePool:
    """The pages of a cache of ``num_pages`` pages, except page 0, and their owner counts.

    ``table_len``: entries of every page table given to the graphs. None: as many as the rows need,
    because the reference lowering costs time per entry. CUDA graphs need a fixed length.
    """

    def __init__(self, num_pages: int, page_size: int, table_len: int | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.table_len = table_len
        # popped from the end: low pages come first, so rows stay contiguous
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = [0] * num_pages
        self._kept = set[int]()
        self._idle = OrderedDict[int, None]()

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_pages - 1 - len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages that are kept and have no other owner."""
        return len(self._idle)

    def owners(self, page: int) -> int:
        """Return the number of owners of ``page``."""
        return self._owners[page]

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free pages.

        Raises:
            UserError: fewer are free.
        """
        if count > len(self._free):
            raise UserError(
                f"KV cache: {count} more pages of {self.page_size} tokens wanted, "
                f"{len(self._free)} of {self.num_pages - 1} free. Raise limits.max_seq_len or "
                "limits.max_batch_size and rebuild."
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that have one already."""
        for page in pages:
            assert self._owners[page], f"page {page} is free, and cannot be shared"
            self._owners[page] += 1
            self._idle.pop(page, None)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove an owner from pages; those without an owner become free."""
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
            elif self._owners[page] == 1 and page in self._kept:
                self._idle[page] = None

    def keep(self, page: int) -> None:
        """Add an owner that keeps a page for its content."""
        self.share([page])
        self._kept.add(page)

    def release(self, page: int) -> None:
        """Undo ``keep``."""
        self._kept.remove(page)
        self._idle.pop(page, None)
        self.give_back([page])

    def idle_since(self, count: int) -> list[int]:
        """Return up to ``count`` idle pages (``num_idle``), the longest idle first."""
        return list(islice(self._idle, count))

    def refresh(self, page: int) -> None:
        """Mark a kept page as the most recently used."""
        if page in self._idle:
            self._idle.move_to_end(page)


class PageTable:
    """The pages of one sequence, in order; row i is in page i // page_size."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[int] = []
        self._version = 0

    def reserve(self, num_rows: int) -> None:
        """Allocate pages until they hold ``num_rows`` rows."""
        num_pages = self._pages_of(num_rows)
        if num_pages > len(self._pages):
            self._pages += self._pool.take(num_pages - len(self._pages))

    def lacking(self, num_rows: int) -> int:
        """Return how many pages for ``num_rows`` rows are neither held nor free.

        0 or less: ``reserve`` succeeds.
        """
        return self._pages_of(num_rows) - len(self._pages) - self._pool.num_free

    def adopt(self, pages: Sequence[int]) -> None:
        """Start with shared pages that already hold the first rows. These rows are only read."""
        assert not self._pages, "a sequence adopts pages before it has any"
        self._pool.share(pages)
        self._pages = list(pages)
        self._version += 1

    @property
    def held(self) -> Sequence[int]:
        """The pages, in order."""
        return tuple(self._pages)

    @property
    def version(self) -> int:
        """A number that changes with the pages, except when pages are appended."""
        return self._version

    @property
    def table_len(self) -> int | None:
        """The pool's ``table_len``."""
        return self._pool.table_len

    def truncate(self, num_rows: int) -> None:
        """Release the pages past ``num_rows`` rows."""
        kept = self._pages_of(num_rows)
        if kept < len(self._pages):
            self._pool.give_back(self._pages[kept:])
            del self._pages[kept:]
            self._version += 1

    def count(self, num_rows: int) -> int:
        """Return how many pages of this sequence a page table lists.

        Those of its first ``num_rows`` rows; with the pool's ``table_len``, all held pages.
        """
        return len(self._pages) if self.table_len is not None else self._pages_of(num_rows)

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        """Return pages ``first`` to ``last`` - 1, int64 [last - first]."""
        return np.array(self._pages[first:last], dtype=np.int64)

    def pages(self, num_rows: int) -> Tensor:
        """Return ``count`` pages, int32 [1, P], padded with page 0 to the pool's ``table_len``."""
        held = self._pages[: self.count(num_rows)]
        padding = [0] * ((self.table_len or 0) - len(held))
        return torch.tensor([held + padding], dtype=torch.int32)

    def slots(self, rows: Tensor) -> Tensor:
        """Return the cache slots (int64) of ``rows`` (int64)."""
        size = self._pool.page_size
        return torch.tensor(self._pages)[rows // size] * size + rows % size

    def _pages_of(self, num_rows: int) -> int:
        return -(-num_rows // self._pool.page_size)


class BatchTable:
    """The page tables of the last batch, kept on the device.

    Only new pages are copied to the device, because a whole table is as wide as the longest
    possible sequence.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._versions: list[tuple[PageTable, int]] = []
        self._counts: list[int] = []
        self._table: Tensor | None = None

    def of(
        self, tables: Sequence[PageTable], num_rows: Sequence[int], size: int | None = None
    ) -> Tensor:
        """Return the pages of the first ``num_rows`` [B] rows of every sequence, int32 [size, P].

        Shorter tables are padded with page 0. Read-only. ``size``: B or more, B by default; rows
        past B have no pages.
        """
        counts = [table.count(rows) for table, rows in zip(tables, num_rows, strict=True)]
        fixed, most = tables[0].table_len, max(counts)
        assert not fixed or most <= fixed, f"{most} pages in a table of {fixed}"
        shape = (len(tables) if size is None else size, fixed or most)
        versions = [(table, table.version) for table in tables]
        found, known = self._table, self._counts
        if found is None or not fixed or versions != self._versions or found.shape != shape:
            found = torch.zeros(shape, dtype=torch.int32, device=self._device)
            known = [0] * len(tables)
        if counts != known:
            found = _with_pages(found, tables, known, counts)
        self._table, self._versions, self._counts = found, versions, counts
        return found


def _with_pages(
    table: Tensor, tables: Sequence[PageTable], known: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """Return a copy of ``table`` extended from ``known`` [B] to ``counts`` [B] pages per row.

    ``table`` itself may still be in use, so it is not changed.
    """
    places, pages = [], []
    for row, (start, stop) in enumerate(zip(known, counts, strict=True)):
        if stop > start:
            first = row * table.shape[1]
            places.append(np.arange(first + start, first + stop))
            pages.append(tables[row].numbers(start, stop))
    news = torch.from_numpy(np.stack([np.concatenate(places), np.concatenate(pages)]))
    there = to_device(news, table.device)
    changed = table.clone()
    changed.view(-1)[there[0]] = there[1].int()
    return changed


class KVCache:
    """The paged states of one graph, token-major.

    States of one shape and type share a buffer ``[states, slots, *shape]``. With a token-major
    layout, compaction moves rows. The reference lowering then needs one ScatterND and one Gather.
    """

    def __init__(
        self, states: Sequence[StateSpec], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate ``num_slots`` rows of each state.

        Raises:
            UserError: the device has not enough memory.
        """
        alike: dict[tuple[tuple[int, ...], str], list[StateSpec]] = {}
        for state in states:
            alike.setdefault((state.shape, state.dtype), []).append(state)
        self._groups = tuple(alike.values())
        try:
            self._buffers = tuple(_zeros(group, num_slots, device) for group in self._groups)
        except RuntimeError as error:  # torch's out-of-memory errors, on the CPU too
            raise UserError(
                f"KV cache: {_num_bytes(states, num_slots) / 1e9:.1f} GB for {num_slots} tokens do "
                "not fit into this device's memory. Lower limits.max_seq_len or "
                "limits.max_batch_size and rebuild."
            ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def bindings(self) -> Iterator[tuple[str, Tensor]]:
        """Yield graph name and buffer of every state's input and output; both share a buffer."""
        for group, buffers in zip(self._groups, self._buffers, strict=True):
            for state, buffer in zip(group, buffers, strict=True):
                yield state.name, buffer
                yield state.output_name, buffer

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy rows from slots ``source`` (int64) to slots ``destination``, in all states.

        All rows are read before any is written.
        """
        for buffer in self._buffers:
            move_rows(buffer, source, destination)


def _zeros(states: Sequence[StateSpec], num_slots: int, device: torch.device | str) -> Tensor:
    """Allocate ``[states, num_slots, *shape]`` for states of one shape and type."""
    # zeros, not empty: masked slots are multiplied by probability 0, and 0 * NaN is NaN
    shape, dtype = states[0].shape, dtype_named(states[0].dtype).torch
    return torch.zeros((len(states), num_slots, *shape), dtype=dtype, device=device)


def _num_bytes(states: Sequence[StateSpec], num_slots: int) -> int:
    return sum(dtype_named(s.dtype).num_bytes(num_slots * prod(s.shape)) for s in states)
