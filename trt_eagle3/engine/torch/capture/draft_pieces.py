"""A draft's forward over prompts as two CUDA graphs, independent of the rows' sequences.

A draft has one attention layer, and only the last row of a prompt is read after it. The first graph
computes all rows up to their keys and values, and writes these to their slots. It is captured for a
few padded numbers of rows. The second graph computes attention and the nodes after it, for the rows
that are read. It is captured for a few padded numbers of those.

Shapes: B segments, S rows of each, R rows read of each, N = B * S rows and W = B * R wanted rows,
both padded, P pages of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trt_eagle3.engine.runtime.buckets import PICKED_ROWS, ROWS
from trt_eagle3.engine.torch.capture.pieces import (
    CapturedPieces,
    RowFormat,
    Split,
    fill_rows,
    split_at_attention,
)
from trt_eagle3.engine.torch.capture.recorder import Record, Recorder, record_pieces
from trt_eagle3.engine.torch.program import Step, Values, computed
from trt_eagle3.engine.torch.prompt_nodes import PROMPT_ATTENTION, ROWS_OF_PROMPTS
from trt_eagle3.graph.decoder import CONTEXT_INPUTS
from trt_eagle3.host_copy import to_device
from trt_eagle3.spec import StateSpec

__all__ = ["DRAFT_ROW_INPUTS", "DraftPieces", "split_draft"]

_MAX_WANTED = PICKED_ROWS.limit
_NUM_NUMBERS = 2 * ROWS.limit + 3 * _MAX_WANTED
_UNUSED_TABLE = _MAX_WANTED  # a row of the page tables that has only page 0
DRAFT_ROW_INPUTS = ("inputs_embeds", "features", "position_ids")
"""Draft inputs with rows that nodes other than attention read."""
_NUM_INPUTS = 10  # of attention without scales of FP8 caches
_OUTPUTS = ("logits", ROWS_OF_PROMPTS)


def split_draft(
    steps: Sequence[Step], inputs: Collection[str], states: Sequence[StateSpec]
) -> Split | None:
    """Cut the prompt ``steps`` of a graph before its only attention. Returns None if the graph is
    not a draft whose states are paged and which computes row by row up to there.
    """
    ops = [step.op for step in steps]
    if ops.count(PROMPT_ATTENTION) != 1 or "TreeAttention" in ops:
        return None
    split = split_at_attention(steps)
    read_later = {name for step in split.tail for name in step.inputs}
    own = {name for state in states for name in (state.name, state.output_name)}
    fits = (
        len(split.tail[0].inputs) == _NUM_INPUTS
        and "Shape" not in ops[: len(split.pieces[0])]
        and read_later.isdisjoint(("inputs_embeds", "features"))
        and all(state.kind == "paged" for state in states)
        and set(inputs) - own == {*DRAFT_ROW_INPUTS, *CONTEXT_INPUTS}
    )
    return split if fits else None


_Graph = tuple[Any, Mapping[str, Tensor]]
"""A graph, and its inputs of N rows by name."""


class DraftPieces(CapturedPieces[_Graph]):
    """The graphs of every captured N and W."""

    def __init__(
        self,
        split: Split,
        constants: Mapping[str, Any],
        inputs: Mapping[str, RowFormat],
        recorder: Recorder,
        device: torch.device,
        *,
        table_len: int,
    ) -> None:
        """See ``CapturedPieces``; ``constants``: the program's and the caches; ``table_len``: P."""
        super().__init__(split, constants, inputs, recorder, device)
        attention = split.tail[0]
        self._k, self._v, self._k_cache, self._v_cache = attention.inputs[1:5]
        self._page_size = attention.attributes["page_size"]
        self._left = sorted(split.left)
        self._device = device
        self._tables = torch.zeros(_MAX_WANTED + 1, table_len, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(_NUM_NUMBERS, dtype=torch.int32, device=device)
        self._of_wanted: dict[int, tuple[Any, Values]] = {}

    def capture(self, most: int, has_room: Callable[[], bool]) -> int:
        """Capture every N for up to ``most`` rows while ``has_room``, then every W. Returns how
        many N have graphs.
        """
        self._tables.zero_()  # rows that capturing writes go to page 0
        num_captured = super().capture(most, has_room)
        for size in reversed(PICKED_ROWS.sizes(_MAX_WANTED)) if num_captured else ():
            self._of_wanted[size] = self._record_wanted(size)
        return num_captured

    def fit(self, inputs: Mapping[str, Tensor]) -> bool:
        """Return whether ``inputs`` have graphs, and their past lengths are on the host."""
        batch, width, _ = inputs["tree_mask"].shape
        wanted, table = inputs["logit_rows"].numel(), inputs["page_table"]
        return (
            inputs["past_lengths"].device.type == "cpu"
            and max(batch, wanted) <= _MAX_WANTED
            and batch * width <= ROWS.limit
            and ROWS.size_of(batch * width) in self._captured
            and PICKED_ROWS.size_of(wanted) in self._of_wanted
            and table.shape[1] == self._tables.shape[1]
        )

    def run(self, inputs: Mapping[str, Tensor]) -> Values:
        """Run ``inputs``, which must ``fit``; see ``Session.run_prompt``.

        The outputs are the graphs' own memory, which the next run overwrites.
        """
        batch, width, _ = inputs["tree_mask"].shape
        past, wanted = inputs["past_lengths"], inputs["logit_rows"]
        numbers = _numbers(past.numpy(), inputs["query_lengths"].numpy(), wanted.numpy(), width)
        self._numbers.copy_(to_device(torch.from_numpy(numbers), self._device))
        self._tables[:batch].copy_(to_device(inputs["page_table"], self._device))
        graph, memory = self._captured[ROWS.size_of(batch * width)]
        fill_rows(memory, [{name: to_device(inputs[name], self._device) for name in memory}])
        graph.replay()
        graph, outputs = self._of_wanted[PICKED_ROWS.size_of(wanted.numel())]
        graph.replay()
        return {
            name: x[: wanted.numel()].view(*wanted.shape, x.shape[-1])
            for name, x in outputs.items()
        }

    def _compute(self, count: int, record: Record) -> _Graph:
        inputs = self._rows(count)
        graph, _ = record(partial(self._up_to_attention, inputs))
        return graph, inputs

    def _record_wanted(self, size: int) -> tuple[Any, Values]:
        work = partial(self._from_attention_on, size)
        return record_pieces(self._recorder, lambda record: record(work), ahead=True)

    def _up_to_attention(self, inputs: Mapping[str, Tensor]) -> Values:
        """Compute rows, write their keys and values, and store the values that
        ``_from_attention_on`` reads.
        """
        values = computed(self.split.pieces[0], {**self._constants, **inputs})
        places, seats = self._numbers[: 2 * ROWS.limit].view(2, -1)[:, : len(values[self._k])]
        first_pages, page_size = seats * self._tables.shape[1], self._page_size
        pages = self._tables.view(-1).index_select(0, first_pages + places // page_size)
        slots = pages.long() * page_size + places % page_size
        for new, cache in ((self._k, self._k_cache), (self._v, self._v_cache)):
            rows = values[new].view(-1, *values[cache].shape[1:])
            values[cache].index_copy_(0, slots, rows)
        for name in self._left:
            rows = values[name]
            self._memory.part_of(name, rows.dtype, rows.shape).copy_(rows)
        return {}

    def _from_attention_on(self, size: int) -> Values:
        """Compute W = ``size`` rows, each as the only new row of a sequence."""
        rows, past, seats = self._numbers[2 * ROWS.limit :].view(3, -1)[:, :size]
        context = {
            "past_lengths": past,
            "query_lengths": torch.ones_like(past),
            "page_table": self._tables.index_select(0, seats),
            "tree_mask": torch.ones_like(past, dtype=torch.bool)[:, None, None],
            "logit_rows": torch.zeros_like(past)[:, None],
            "position_ids": torch.zeros_like(past).expand(3, -1)[..., None],  # its shape is read
        }
        left = {name: self._memory.whole(name).index_select(0, rows) for name in self._left}
        values = computed(self.split.tail, {**self._constants, **left, **context})
        return {name: values[name].flatten(0, 1) for name in _OUTPUTS}


def _numbers(
    past: NDArray[np.int32], counts: NDArray[np.int32], wanted: NDArray[np.int32], width: int
) -> NDArray[np.int32]:
    """Return the numbers that both graphs read.

    For every row: its position in its sequence, and the row of its page table. For every wanted
    row: its index among all rows, its position, and the row of its page table. Padding writes to
    page 0.

    Args:
        past: [B] rows before. counts: [B] real rows. wanted: [B, R].
    """
    found = np.zeros(_NUM_NUMBERS, dtype=np.int32)
    batch, row = len(past), np.arange(width)
    seats = np.arange(batch)[:, None]
    is_real = row < counts[:, None]
    rows = found[: 2 * ROWS.limit].reshape(2, -1)
    rows[1] = _UNUSED_TABLE
    rows[0, : batch * width] = np.where(is_real, past[:, None] + row, 0).ravel()
    rows[1, : batch * width] = np.where(is_real, seats, _UNUSED_TABLE).ravel()
    read = found[2 * ROWS.limit :].reshape(3, -1)
    read[2] = _UNUSED_TABLE
    read[0, : wanted.size] = (seats * width + wanted).ravel()
    read[1, : wanted.size] = (past[:, None] + wanted).ravel()
    read[2, : wanted.size] = np.repeat(seats, wanted.shape[1])
    return found
