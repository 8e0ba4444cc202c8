"""BlockParity: ``DraftParity`` of block drafts.

The reference computes context rows from the engine's own aux rows, a block over those, and the
heads after the tokens that the engine chose. So each tensor shows the errors of its own part.

Shapes: n context rows, S rows of a block, R rows of the head, m drafts, Hd draft hidden, Hkv heads,
D head_dim, Vd draft vocab, C blocks of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.tensor_index import read_tensor
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.drafts.block.reference import BlockProposal, BlockReference, BlockRows
from trt_eagle3.parity.metrics import Compared, RowErrors, errors_or_infinite, row_errors, sizes
from trt_eagle3.parity.record.blocks import (
    Block,
    BlockRecord,
    ContextRow,
    HeadRow,
    Replayed,
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
from trt_eagle3.parity.reference.drafting import AcceptanceCounts, DraftReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["BlockParity"]

_IN_STREAM = ("output", "attention_residual")
"""Ends of the names of tensors that a float16 engine holds at another scale."""


@dataclass(frozen=True)
class BlockParity:
    """Implements ``DraftParity``. ``draft``: that of ``reference``."""

    draft: BlockReference
    reference: DraftReference

    def compare(
        self, record: Record, expected: Sequence[ExpectedAnswer], progress: Callable[[], object]
    ) -> tuple[list[ComparedDraft], AcceptanceCounts]:
        found, acceptance = [], AcceptanceCounts()
        for e in expected:
            blocks = read_blocks(e.answer.speculative_forwards)
            compared = ComparedDraft(e.answer.name, blocks.verified)
            run = _Run.of(self, e, blocks)
            if run.rows:
                _Comparison(self, record, e, run, compared).fill(blocks, acceptance)
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
        replayed = replay_blocks(record, blocks, len(run.rows), names)
        for name, (ours, theirs) in _paired(run, replayed, names).items():
            yield name, errors_or_infinite(ours, theirs)

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

    def fill(self, blocks: BlockRecord, acceptance: AcceptanceCounts) -> None:
        self._compare_inputs()
        names = [f"layers.{i}.post_attention_layernorm" for i in range(self._m.num_layers)]
        names += [f"layers.{i}.input_layernorm" for i in range(1, self._m.num_layers)]
        names = [*sorted(names), "norm"]
        replayed = replay_blocks(self._record, blocks, len(self._run.rows), names)
        self._compare_context(replayed.context)
        for name, pair in _paired(self._run, replayed, names).items():
            self._draft.features.append(self._errors(name, *pair))
        self._compare_outputs()
        for (_, block), rows_ in zip(self._run.cycles, self._run.expected, strict=True):
            self._compare_heads(block, rows_, acceptance)

    def _errors(self, tensor: str, ours: Tensor, theirs: Tensor) -> RowErrors:
        return RowErrors(self._draft.case, tensor, errors_or_infinite(ours, theirs))

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

    def _compare_context(self, caches: KeysValues) -> None:
        for i, (ours, theirs) in enumerate(zip(caches, self._run.context, strict=True)):
            for name, own, wanted in zip("kv", ours, theirs, strict=True):
                self._draft.context.append(
                    self._errors(f"layers.{i}.self_attn.{name}", own, wanted)
                )

    def _compare_outputs(self) -> None:
        """Compare hidden states and logits of the rows of the head."""
        first = self._m.first_head_row
        pairs = [
            (c, rows) for (_, c), rows in zip(self._run.cycles, self._run.expected, strict=True)
        ]
        if not pairs:
            return
        if pairs[0][0].hidden is not None:
            ours = torch.cat([c.hidden for c, _ in pairs if c.hidden is not None])
            theirs = torch.cat([rows.hidden[first:] for _, rows in pairs])
            self._draft.features.append(self._errors("hidden", ours, theirs))
        ours = torch.cat([c.logits for c, _ in pairs])
        theirs = torch.cat([rows.logits[first:] for _, rows in pairs])
        self._draft.logits.append(self._errors("logits", ours, theirs))

    def _compare_heads(self, block: Block, rows: BlockRows, acceptance: AcceptanceCounts) -> None:
        """Compare scores, tokens and confidence of one block, and count what it accepts."""
        anchor, draft = int(self._known[block.num_rows]), self._draft
        ours = replay_heads(self._record.engine, block, anchor)
        told = [row.token for row in ours]
        theirs = self._parity.draft.propose(anchor, rows, draw=lambda i, _: told[i])
        name = "selector" if self._m.selector_top_k else "markov"
        if self._m.has_sequential_head:
            errors = [_score_errors(row, theirs.all_scores[i].cpu()) for i, row in enumerate(ours)]
            draft.scores.append(
                RowErrors(draft.case, f"scores.{name}", torch.cat(errors), block.num_rows)
            )
        if theirs.confidence is not None:
            found = torch.tensor([row.confidence for row in ours], dtype=torch.float64)
            wanted = theirs.confidence.cpu()[:, None]
            by_draft = row_errors(found[:, None], wanted)
            draft.confidence.append(RowErrors(draft.case, "confidence", by_draft, block.num_rows))
        verified = self._verified(block, ours)
        first = len(rows.logits) - len(ours)
        draft.tokens += [
            self._token(block.num_rows + 1 + i, told[i], theirs, i, rows.logits[first + i].cpu())
            for i in range(verified)
        ]
        self._count_accepted(block, anchor, rows, acceptance)

    def _verified(self, block: Block, ours: Sequence[HeadRow]) -> int:
        """Return how many nodes hold the tokens of the heads; adds the others as wrong."""
        nodes, dtype = block.nodes, self._record.engine.dtype
        if not len(nodes):
            return 0
        ids = torch.tensor([row.token for row in ours])
        wanted = self._parity.reference.target.embed(ids).cpu().to(dtype)
        same = [torch.equal(a, b) for a, b in zip(nodes, wanted, strict=False)]
        count = same.index(False) if False in same else len(same)
        extra = len(nodes) - len(ours)
        wrong = [f"draft {count}"] if count < len(same) else []
        wrong += [f"draft {len(ours)}"] * max(0, extra)
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
        self, block: Block, anchor: int, rows: BlockRows, acceptance: AcceptanceCounts
    ) -> None:
        """Count the accepted drafts, for the engine's and the reference's proposal."""
        depth = len(block.nodes)
        if not depth or block.verify is None or block.num_rows + depth >= len(self._known):
            return
        truth = self._known[block.num_rows + 1 : block.num_rows + 1 + depth].tolist()
        engine = len(path_rows(block.verify, rows_of(block.verify), self._table)) - 1
        own = self._parity.draft.propose(anchor, rows).tokens
        same = [a == b for a, b in zip(own, truth, strict=False)]
        acceptance.add(depth, engine, same.index(False) if False in same else len(same))


def _indices(first: int, like: Tensor) -> Tensor:
    """[S, 3]: sequence indices from ``first`` on, in the shape and dtype of ``like``."""
    rows = torch.arange(first, first + len(like), dtype=like.dtype)
    return rows[:, None].expand(-1, like.shape[1])


def _paired(
    run: _Run, replayed: Replayed, names: Sequence[str]
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Pair the tensors ``names`` of all blocks, in the order of ``names``."""
    if not run.cycles:
        return {}
    pairs = {}
    for name in names:
        if name in replayed.blocks[run.cycles[0][0]]:
            ours = torch.cat([replayed.blocks[i][name].flatten(1) for i, _ in run.cycles])
            theirs = torch.cat([rows.intermediates[name].flatten(1) for rows in run.expected])
            pairs[name] = (ours, theirs)
    return pairs


def _score_errors(ours: HeadRow, theirs: Tensor) -> Tensor:
    """float64 [1]: the error of the scores of a row, of its candidates if there are some."""
    found, ids = ours.scores.scores, ours.scores.ids
    return row_errors(found[None], (theirs if ids is None else theirs[ids])[None])
