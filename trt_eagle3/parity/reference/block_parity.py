"""BlockParity: ``DraftParity`` of block drafts.

The reference computes context rows from the engine's own aux rows, a block over those, and the
heads after the tokens that the engine chose. So each tensor shows the errors of its own part.

Shapes: n context rows, S rows of a block, R rows of the head, m drafts, Hd draft hidden, Hkv heads,
D head_dim, Vd draft vocab, C blocks of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.drafts.block.reference import BlockProposal, BlockReference, BlockRows
from trt_eagle3.parity.metrics import Compared, RowErrors, errors_or_infinite, row_errors, sizes
from trt_eagle3.parity.record.answers import served_answers
from trt_eagle3.parity.record.blocks import (
    Block,
    BlockRecord,
    ContextRow,
    HeadRow,
    read_blocks,
    replay_blocks,
    replay_heads,
)
from trt_eagle3.parity.record.record import Record
from trt_eagle3.parity.record.trace import rows_of
from trt_eagle3.parity.record.trees import path_rows
from trt_eagle3.parity.reference.compared_draft import ComparedDraft, DraftedToken, Proposals
from trt_eagle3.parity.reference.draft import KeysValues
from trt_eagle3.parity.reference.draft_parity import Errors
from trt_eagle3.parity.reference.drafting import Acceptance, DraftReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["BlockParity"]

Make = Callable[[torch.dtype], BlockReference]
"""Loads the draft in a dtype."""

_IN_STREAM = ("output", "attention_residual")
"""Ends of the names of tensors that a float16 engine holds at another scale."""


@dataclass(frozen=True)
class BlockParity:
    """Implements ``DraftParity``.

    Attributes:
        draft: that of ``reference``.
        make: the same draft in other dtypes.
        precision: the dtype whose tolerances apply.
    """

    draft: BlockReference
    reference: DraftReference
    make: Make
    precision: torch.dtype

    def compare(
        self, record: Record, expected: Sequence[ExpectedAnswer], progress: Callable[[], object]
    ) -> tuple[list[ComparedDraft], Acceptance]:
        found, acceptance = [], Acceptance()
        for e, served in zip(expected, served_answers([e.answer for e in expected]), strict=True):
            blocks = read_blocks(e.answer.speculative_forwards)
            compared = ComparedDraft(e.answer.name, blocks.verified)
            run = _Run.of(self, e, blocks)
            if run.rows:
                comparison = _Comparison(self, record, e, run, compared)
                comparison.fill(blocks, acceptance, served=served)
            found.append(compared)
            progress()
        return found, acceptance

    def inside(self, record: Record, e: ExpectedAnswer) -> Errors:
        """Yield errors inside the block graph, over all blocks of the answer."""
        blocks = read_blocks(e.answer.speculative_forwards)
        run = _Run.of(self, e, blocks)
        names = list(run.expected[0].intermediates) if run.expected else []
        if record.engine.dtype == torch.float16:
            names = [name for name in names if not name.endswith(_IN_STREAM)]
        theirs = run.tensors(self.draft.manifest)
        for name, ours in _replayed(record, blocks, run, names).items():
            if name in names:
                yield name, errors_or_infinite(ours, theirs[name])

    def accepted(self, e: ExpectedAnswer, steps: int) -> Tensor:
        m, draft = self.draft.manifest, self.draft
        best, count = e.logits.argmax(dim=-1).tolist(), e.answer.num_rows - 1
        told = e.answer.token_ids.tolist()
        aux = torch.cat([e.aux[k] for k in m.aux_layers], dim=-1)
        context = draft.context(aux.to(self.reference.target.device, draft.dtype))
        accepted = []
        for row in range(e.answer.prompt_len - 1, count):
            block = self.run(told[row + 1], row + 1, m.rows_of(steps), context)
            drafts, length = draft.propose(told[row + 1], block).tokens, 0
            for token in drafts:
                place = row + 2 + length
                if place >= len(told) or token != best[place - e.answer.prompt_len]:
                    break
                length += 1
                if token != told[place]:
                    break
            accepted.append(length)
        return torch.tensor(accepted, dtype=torch.int64)

    def rounding(self, record: Record, e: ExpectedAnswer) -> Mapping[str, Tensor]:
        """Compute ``DraftParity.rounding``: from the engine's aux rows, after its tokens."""
        blocks = read_blocks(e.answer.speculative_forwards)
        sides = [replace(self, draft=draft) for draft in self._narrow_and_wide]
        runs = [_Run.of(side, e, blocks) for side in sides]
        narrow, wide = (
            run.tensors(self.draft.manifest) | _after_heads(side, record, e, run)[1]
            for side, run in zip(sides, runs, strict=True)
        )
        return {name: row_errors(narrow[name], wanted) for name, wanted in wide.items()}

    @cached_property
    def _narrow_and_wide(self) -> tuple[BlockReference, BlockReference]:
        narrow = self.make(self.precision)
        return narrow, self.make(torch.float64) if narrow.dtype == self.draft.dtype else self.draft

    def embed(self, anchor: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [S, Hd] of a block as the graph receives them, on the CPU."""
        m = self.draft.manifest
        ids = torch.tensor([anchor] + [m.mask_token_id] * (num_rows - 1))
        rows = self.reference.embed(ids, dtype).clone()
        if m.mask_embedding == "own":
            rows[1:] = read_tensor(m.tensors["mask_embedding"]).to(dtype)
        return rows

    def run(
        self,
        anchor: int,
        position: int,
        num_rows: int,
        context: KeysValues,
        dtype: torch.dtype | None = None,
    ) -> BlockRows:
        """Run the block after ``anchor``, which has index ``position``.

        ``dtype``: of the engine's token table; None: the reference's.
        """
        draft = self.draft
        rows = self.embed(anchor, num_rows, dtype or draft.dtype)
        scaled = rows.to(self.reference.target.device, draft.dtype) * draft.manifest.embedding_scale
        return draft.run(scaled, position, [(k[:position], v[:position]) for k, v in context])


@dataclass(frozen=True)
class _Run:
    """The reference's run over the blocks of one answer.

    Attributes:
        rows: the context rows that lie on the answer, as far as it is the same without speculation.
        cycles: the blocks after these rows, with their place in the record.
        context: the reference's keys and values of ``rows``.
        expected: the reference's block of each cycle.
        missing: whether a block was drafted after a row that the draft did not receive.
    """

    rows: Sequence[ContextRow]
    cycles: Sequence[tuple[int, Block]]
    context: KeysValues
    expected: Sequence[BlockRows]
    missing: bool

    @classmethod
    def of(cls, parity: BlockParity, e: ExpectedAnswer, record: BlockRecord) -> _Run:
        known = min(e.answer.prompt_len + e.answer.agreed, e.answer.num_rows)
        rows: list[ContextRow] = []
        while len(rows) < known and len(rows) in record.committed:
            rows.append(record.committed[len(rows)])
        on_answer = [(i, c) for i, c in enumerate(record.cycles) if c.num_rows < known]
        cycles = [(i, c) for i, c in on_answer if c.num_rows <= len(rows)]
        missing = len(cycles) < len(on_answer)
        if not rows:
            return cls(rows, [], [], [], missing)
        draft, device = parity.draft, parity.reference.target.device
        context = draft.context(torch.stack([r.aux for r in rows]).to(device, draft.dtype))
        tokens = e.answer.token_ids
        expected = [
            parity.run(int(tokens[c.num_rows]), c.num_rows, len(c.embeds), context, c.embeds.dtype)
            for _, c in cycles
        ]
        return cls(rows, cycles, context, expected, missing)

    def tensors(self, m: BlockManifest) -> dict[str, Tensor]:
        """Return tensors by name: of the context rows [n, ...], and of the rows of all blocks."""
        found = _by_cache(self.context)
        if self.expected:
            for name in self.expected[0].intermediates:
                rows = [rows.intermediates[name].flatten(1) for rows in self.expected]
                found[name] = torch.cat(rows)
            first = m.first_head_row
            found["hidden"] = torch.cat([rows.hidden[first:] for rows in self.expected])
            found["logits"] = torch.cat([rows.logits[first:] for rows in self.expected])
        return found


class _Comparison:
    """Compares one answer, and fills in ``draft``."""

    def __init__(
        self,
        parity: BlockParity,
        record: Record,
        expected: ExpectedAnswer,
        run: _Run,
        draft: ComparedDraft,
    ) -> None:
        self._parity, self._record, self._expected = parity, record, expected
        self._run, self._draft = run, draft
        self._m: BlockManifest = parity.draft.manifest
        answer = expected.answer
        self._known = answer.token_ids[: answer.prompt_len + answer.agreed]
        embeds = parity.reference.target.embed(self._known).cpu()
        self._table = embeds.to(record.engine.dtype)

    def fill(self, blocks: BlockRecord, acceptance: Acceptance, *, served: bool) -> None:
        self._compare_inputs()
        self._compare_rows(blocks)
        heads, after = _after_heads(self._parity, self._record, self._expected, self._run)
        self._compare_heads(heads, after)
        for (_, block), rows, ours in zip(self._run.cycles, self._run.expected, heads, strict=True):
            anchor = int(self._known[block.num_rows])
            self._compare_tokens(block, anchor, rows, ours)
            self._count_accepted(block, anchor, rows, acceptance, served=served)

    def _compare_inputs(self) -> None:
        rows, draft, m = self._run.rows, self._draft, self._m
        aux = torch.stack([r.aux for r in rows]).chunk(len(m.aux_layers), dim=-1)
        for k, name, part in zip(m.aux_layers, m.aux_names, aux, strict=True):
            errors = row_errors(part, self._expected.verified.aux[k][: len(rows)])
            draft.aux.append(RowErrors(draft.case, f"aux_hidden_states[{name}]", errors))
        if self._run.missing:
            gone = torch.tensor([torch.inf])
            draft.aux.append(RowErrors(draft.case, "aux_hidden_states", gone, len(rows)))
        given = torch.stack([r.position for r in rows])
        draft.position_ids.append(Compared(draft.case, "position_ids", given, _indices(0, given)))
        for _, block in self._run.cycles:
            anchor = int(self._known[block.num_rows])
            embeds = self._parity.embed(anchor, len(block.embeds), block.embeds.dtype)
            draft.inputs_embeds.append(
                Compared(draft.case, "inputs_embeds.block", block.embeds, embeds, block.num_rows)
            )
            wanted = _indices(block.num_rows, block.positions)
            draft.position_ids.append(
                Compared(draft.case, "position_ids.block", block.positions, wanted, block.num_rows)
            )

    def _compare_rows(self, blocks: BlockRecord) -> None:
        """Compare context rows, and the rows of blocks up to the head."""
        layers, draft = range(self._m.num_layers), self._draft
        names = [f"layers.{i}.input_layernorm" for i in layers[1:]]
        names += [f"layers.{i}.post_attention_layernorm" for i in layers]
        ours = _replayed(self._record, blocks, self._run, [*sorted(names), "norm"])
        cycles = [block for _, block in self._run.cycles]
        hidden = [c.hidden for c in cycles if c.hidden is not None]
        if hidden:
            ours["hidden"] = torch.cat(hidden)
        if cycles:
            ours["logits"] = torch.cat([c.logits for c in cycles])
        theirs = self._run.tensors(self._m)
        for name, found in ours.items():
            errors = RowErrors(draft.case, name, errors_or_infinite(found, theirs[name]))
            is_cache = name.partition(".")[0] in ("k_cache", "v_cache")
            part = draft.context if is_cache else draft.features
            (draft.logits if name == "logits" else part).append(errors)

    def _compare_heads(self, heads: Sequence[Sequence[HeadRow]], after: _Scores) -> None:
        """Compare scores and confidence, over all blocks."""
        rows, draft = [row for block in heads for row in block], self._draft
        for name, theirs in after.items():
            if name == "confidence":
                told = torch.tensor([[row.confidence] for row in rows], dtype=torch.float64)
                draft.confidence.append(RowErrors(draft.case, name, row_errors(told, theirs)))
            else:
                errors = [
                    errors_or_infinite(row.scores.scores[None], wanted[None])
                    for row, wanted in zip(rows, theirs, strict=True)
                ]
                draft.scores.append(RowErrors(draft.case, name, torch.cat(errors)))

    def _compare_tokens(
        self, block: Block, anchor: int, rows: BlockRows, ours: Sequence[HeadRow]
    ) -> None:
        """Compare the tokens that were verified with the heads' and with the reference's."""
        told = [row.token for row in ours]
        theirs = self._parity.draft.propose(anchor, rows, draw=_told(told))
        first = len(rows.logits) - len(ours)
        self._draft.tokens += [
            self._token(block.num_rows + 1 + i, told[i], theirs, i, rows.logits[first + i].cpu())
            for i in range(self._verified(block, told))
        ]

    def _verified(self, block: Block, told: Sequence[int]) -> int:
        """Return how many nodes hold the tokens ``told``; adds the first other one as wrong."""
        nodes = block.nodes
        if not len(nodes):
            return 0
        wanted = self._parity.reference.target.embed(torch.tensor(told)).cpu()
        same = [
            torch.equal(node, row) for node, row in zip(nodes, wanted.to(nodes.dtype), strict=False)
        ]
        count = same.index(False) if False in same else len(same)
        wrong = [f"draft {count}"] if count < len(nodes) else []
        rule = "not the best token of the draft's own heads, after those before it"
        self._draft.proposals.append(Proposals(block.num_rows, len(nodes), wrong, rule))
        return count

    def _token(
        self, row: int, token: int, theirs: BlockProposal, i: int, logits: Tensor
    ) -> DraftedToken:
        """Measure how far the reference ranks a draft below its own choice."""
        scores, every = theirs.scores[i].cpu(), theirs.all_scores[i].cpu()
        ids = self._parity.reference.target_ids(torch.arange(self._m.draft_vocab_size))
        places = (ids == token).nonzero().flatten()
        best = int(scores.argmax())
        margin = torch.inf
        if len(places):
            margin = float(scores[best] - every[places[0]])
            if self._m.selector_top_k:  # it must be a candidate too
                last = logits.topk(self._m.selector_top_k).values[-1]
                margin = max(margin, float(last - logits[places[0]]))
        size = float(sizes(every[None]))
        return DraftedToken(self._draft.case, row, int(ids[best]), token, margin, size)

    def _count_accepted(
        self, block: Block, anchor: int, rows: BlockRows, acceptance: Acceptance, *, served: bool
    ) -> None:
        """Count the accepted drafts, for the engine's and the reference's proposal."""
        depth = len(block.nodes)
        if not depth or block.verify is None or block.num_rows + depth >= len(self._known):
            return
        truth = self._known[block.num_rows + 1 : block.num_rows + 1 + depth].tolist()
        engine = len(path_rows(block.verify, rows_of(block.verify), self._table)) - 1
        own = self._parity.draft.propose(anchor, rows).tokens
        same = [a == b for a, b in zip(own, truth, strict=False)]
        reference = same.index(False) if False in same else len(same)
        acceptance.recorded.add(depth, engine, reference)
        if served:
            answer = self._expected.answer
            room = answer.prompt_len + answer.served_len - (block.num_rows + 1)
            acceptance.served.add(depth, engine, reference, room)


_Scores = dict[str, Tensor]
"""``scores.selector`` or ``scores.markov`` [C * m, candidates], and ``confidence`` [C * m, 1]."""


def _after_heads(
    parity: BlockParity, record: Record, e: ExpectedAnswer, run: _Run
) -> tuple[list[list[HeadRow]], _Scores]:
    """Run the engine's heads over all blocks, and the reference's after the same tokens.

    Scores are those of the engine's candidates.
    """
    m, found = parity.draft.manifest, list[list[HeadRow]]()
    scores, confidence = list[Tensor](), list[Tensor]()
    ids = parity.reference.target_ids(torch.arange(m.draft_vocab_size))
    places = torch.zeros(m.vocab_size, dtype=torch.int64)  # of target ids in the draft's vocabulary
    places[ids] = torch.arange(len(ids))
    for (_, block), rows in zip(run.cycles, run.expected, strict=True):
        anchor = int(e.answer.token_ids[block.num_rows])
        ours = replay_heads(record.engine, block, anchor)
        told = [row.token for row in ours]
        theirs = parity.draft.propose(anchor, rows, draw=_told(told))
        for row, every in zip(ours, theirs.all_scores.cpu(), strict=True):
            scores.append(every if row.scores.ids is None else every[places[row.scores.ids]])
        if theirs.confidence is not None:
            confidence.append(theirs.confidence.cpu()[:, None])
        found.append(ours)
    after: _Scores = {}
    if m.has_sequential_head and scores:
        after["scores.selector" if m.selector_top_k else "scores.markov"] = torch.stack(scores)
    if confidence:
        after["confidence"] = torch.cat(confidence)
    return found, after


def _told(tokens: Sequence[int]) -> Callable[[int, Tensor], int]:
    """Return a ``draw`` that chooses ``tokens``."""
    return lambda draft, _: tokens[draft]


def _replayed(
    record: Record, blocks: BlockRecord, run: _Run, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the engine's caches, and the tensors ``names`` of the block graph, as in a run."""
    found = replay_blocks(record, blocks, len(run.rows), names)
    tensors = _by_cache(found.context)
    for name in names:
        if run.cycles and name in found.blocks[run.cycles[0][0]]:
            tensors[name] = torch.cat([found.blocks[i][name].flatten(1) for i, _ in run.cycles])
    return tensors


def _by_cache(context: KeysValues) -> dict[str, Tensor]:
    return {
        f"{kind}_cache.{i}": rows.flatten(1)
        for i, layer in enumerate(context)
        for kind, rows in zip("kv", layer, strict=True)
    }


def _indices(first: int, like: Tensor) -> Tensor:
    """[S, 3]: sequence indices from ``first`` on, in the shape and dtype of ``like``."""
    rows = torch.arange(first, first + len(like), dtype=like.dtype)
    return rows[:, None].expand(-1, like.shape[1])
