"""A block draft's part of a record: its context rows, and the block drafted in each cycle.

Keys, values and tensors inside the graphs are those of the same forwards, run again over the
engine's own caches. The scores of the heads are those of the engine's heads over the recorded
logits.

Shapes: n context rows, S rows of a block, R rows of the head, m drafts, k * H aux states, Hd draft
hidden, Hkv heads, D head_dim, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from trt_eagle3.decode.speculation.block import BlockDrafter
from trt_eagle3.decode.speculation.block_heads import RowScores
from trt_eagle3.parity.record.engine import RecordedForward, RecordingEngine, replay
from trt_eagle3.parity.record.intermediates import tensor_names
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.trace import ForwardRows, positions_of, rows_of

__all__ = [
    "Block",
    "BlockRecord",
    "ContextRow",
    "HeadRow",
    "Replayed",
    "read_blocks",
    "replay_blocks",
    "replay_heads",
]


@dataclass(frozen=True)
class ContextRow:
    """A row whose keys and values the draft wrote: ``aux`` [k * H] and ``position`` [3]."""

    aux: Tensor
    position: Tensor


@dataclass(frozen=True)
class Block:
    """The block drafted after ``num_rows`` rows of a sequence.

    ``verify``: the target's forward over its tokens; None if there was none.
    """

    num_rows: int
    forward: RecordedForward
    verify: RecordedForward | None = None

    @cached_property
    def _rows(self) -> ForwardRows:
        return rows_of(self.forward)

    @property
    def embeds(self) -> Tensor:
        """[S, Hd]: the input rows."""
        return self._rows.cut(self.forward.inputs["inputs_embeds"])

    @property
    def positions(self) -> Tensor:
        """[S, 3]."""
        return positions_of(self.forward)

    @property
    def logits(self) -> Tensor:
        """f32 [R, Vd]."""
        return self.forward.outputs["logits"][self._rows.batch]

    @property
    def hidden(self) -> Tensor | None:
        """[R, Hd], after the final norm; None if no head reads it."""
        found = self.forward.outputs.get("hidden")
        return None if found is None else found[self._rows.batch]

    @property
    def nodes(self) -> Tensor:
        """[m', H]: the target's embeddings of the drafts that were verified; m' is at most m."""
        if self.verify is None:
            return torch.empty(0, 0)
        return rows_of(self.verify).cut(self.verify.inputs["inputs_embeds"])[1:]


@dataclass(frozen=True)
class BlockRecord:
    """All that the draft ran for one answer. ``forwards``: of both graphs, in order."""

    committed: Mapping[int, ContextRow]
    cycles: Sequence[Block]
    forwards: Sequence[RecordedForward]

    @property
    def verified(self) -> bool:
        """Whether a block was drafted and verified."""
        return any(len(c.nodes) for c in self.cycles)


def read_blocks(forwards: Sequence[RecordedForward]) -> BlockRecord:
    """Sort the forwards of a speculative run into context rows and blocks."""
    committed: dict[int, ContextRow] = {}
    cycles: list[Block] = []
    for p in forwards:
        if p.graph == "context":
            rows = rows_of(p)
            found = zip(rows.cut(p.inputs["aux_hidden_states"]), positions_of(p), strict=True)
            committed |= {rows.start + i: ContextRow(*row) for i, row in enumerate(found)}
        elif p.graph == "block":
            cycles.append(Block(rows_of(p).past, p))
        elif p.graph == "target" and cycles:
            last = cycles[-1]
            if last.verify is None and rows_of(p).past == last.num_rows:
                cycles[-1] = replace(last, verify=p)
    return BlockRecord(committed, cycles, [p for p in forwards if p.graph in ("context", "block")])


@dataclass(frozen=True)
class Replayed:
    """Tensors of the draft's forwards, which were run again.

    Attributes:
        context: by layer, keys and values [n, Hkv, D] in the caches after the last forward.
        blocks: by cycle, tensors [S, ...] inside the block graph by name.
    """

    context: Sequence[tuple[Tensor, Tensor]]
    blocks: Sequence[Mapping[str, Tensor]]


def replay_blocks(
    record: Record, found: BlockRecord, num_rows: int, names: Sequence[str]
) -> Replayed:
    """Run the forwards of ``found`` again.

    Args:
        num_rows: n, the context rows to return.
        names: the tensors of the block graph to return. Those that the backend does not expose are
            missing in the result.
    """
    engine, bound = record.engine, record.bound["block"]
    known = tensor_names(engine, "block")
    wanted = [name for name in names if name in known]
    sessions = {
        "context": engine.open_graph("context"),
        "block": engine.open_graph("block", wanted),
    }
    blocks = []
    for p in found.forwards:
        (outputs,) = replay(sessions[p.graph], [p], bound)
        if p.graph == "block":
            rows = rows_of(p)
            blocks.append({name: rows.cut(outputs[name]) for name in wanted})
    engine.take()
    return Replayed(_cached(found.forwards, bound, num_rows, engine.page_size), blocks)


def _cached(
    forwards: Sequence[RecordedForward], bound: Mapping[str, Tensor], num_rows: int, page_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Read the first ``num_rows`` rows of the sequence from the caches."""
    last = max(forwards, key=lambda p: rows_of(p).start + rows_of(p).count)
    pages = last.inputs["page_table"][rows_of(last).batch].long()
    row = torch.arange(num_rows)
    slots = pages[row // page_size] * page_size + row % page_size
    layers = sum(name.startswith("k_cache.") for name in bound)
    return [
        (bound[f"k_cache.{i}"].cpu()[slots], bound[f"v_cache.{i}"].cpu()[slots])
        for i in range(layers)
    ]


@dataclass(frozen=True)
class HeadRow:
    """What the engine's heads make of one draft, after the tokens that they chose before it.

    Attributes:
        token: target id.
        scores: of its row, for one sequence.
        confidence: None without a confidence head.
    """

    token: int
    scores: RowScores
    confidence: float | None


def replay_heads(engine: RecordingEngine, block: Block, anchor: int) -> list[HeadRow]:
    """Choose the tokens of a block again, greedily, with the engine's heads."""
    assert isinstance(engine.drafter, BlockDrafter), type(engine.drafter)
    m, heads, device = engine.drafter.manifest, engine.drafter.heads, engine.device
    outputs = {"logits": block.logits[None].to(device)}
    if block.hidden is not None:
        outputs["hidden"] = block.hidden[None].to(device)
    roots = torch.tensor([anchor], device=device)
    indices = torch.arange(m.drafts_of(len(block.embeds)), device=device)[None]
    hidden = outputs.get("hidden")
    rows = list(heads.walk(outputs["logits"], hidden, roots, indices, sampling=None, allowed=None))
    tokens = torch.cat([drafts.tokens for _, drafts in rows], dim=1)
    each = heads.confidence(torch.cat([roots[:, None], tokens[:, :-1]], dim=1), hidden)
    found = []
    for i, (row, _) in enumerate(rows):
        ids = None if row.ids is None else row.ids[0].cpu()
        scores = RowScores(row.scores[0].cpu(), ids)
        confidence = None if each is None else float(each[0, i])
        found.append(HeadRow(int(tokens[0, i]), scores, confidence))
    return found
