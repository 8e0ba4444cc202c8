"""A tiny random pair that decodes, and a trace of what it did that can be held against
recomputation from scratch.

Shapes: P prompt rows, T tree nodes, H target hidden, Hd draft hidden, V vocab, Vd draft vocab.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.reference.checkpoint import file_name, random_draft
from tests.reference.target import Target, random_target
from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.forward.runner import (
    AttentionMetadata,
    DraftRunner,
    TargetInputs,
    TargetRunner,
)
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.request.prompt import Prompt, Vision
from trt_eagle3.decode.speculation import grow as grow_module
from trt_eagle3.decode.speculation.drafter import Drafter
from trt_eagle3.decode.speculation.dynamic_tree import Candidates, Frontier
from trt_eagle3.decode.speculation.eagle import EagleDrafter, LastRow
from trt_eagle3.decode.speculation.grow import DraftInputs, TreeGrower
from trt_eagle3.decode.speculation.tree import AnyTree, Tree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.drafts.eagle3.graph import draft_graph, fuse_graph
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Reduction
from trt_eagle3.graph.target import target_graph

VOCAB, DRAFT_VOCAB = 12, 8  # so few that a random draft is right now and then
PAGE_SIZE, NUM_PAGES, PREFILL_CHUNK = 4, 25, 5


@dataclass
class Recorder:
    """What a run did: root logits by row, states with their number of rows, and every
    proposal."""

    roots: list[tuple[int, Tensor]] = field(default_factory=list)
    states: list[tuple[int, LastRow]] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)


@dataclass
class Proposal:
    """A tree filled after ``num_rows`` rows; ``logits``: of its inner nodes, level by level."""

    num_rows: int
    tree: Tree
    tokens: list[int]
    logits: list[Tensor]


class RecordingTarget(TargetRunner):
    """Mixes prompts and steps as far as its caller can see: one forward after the other."""

    mixes = True
    recorder: Recorder

    def forward(
        self,
        embeds: Tensor,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
        visual_levels: Tensor | None = None,
        reduce: Reduction | None = None,
    ) -> Any:
        logits, aux = super().forward(embeds, metadata, logit_rows, visual_levels)
        self.recorder.roots.append((int(metadata.past[0] + logit_rows[0, 0]), logits[0, 0]))
        return reduce(logits) if reduce else logits, aux

    def forward_mixed(
        self, prompts: TargetInputs, steps: TargetInputs, reduce: Reduction | None
    ) -> Any:
        return self.forward(*vars(prompts).values()), self.forward(*vars(steps).values(), reduce)


class RecordingDraft(DraftRunner):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.level_logits: list[Tensor] = []

    def forward(
        self, embeds: Tensor, features: Tensor, metadata: AttentionMetadata, logit_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, out = super().forward(embeds, features, metadata, logit_rows)
        self.level_logits.append(logits[0])
        return logits, out


class RecordingGrower(TreeGrower):
    def __init__(self, runner: RecordingDraft, recorder: Recorder) -> None:
        super().__init__(runner)
        self._draft, self._recorder = runner, recorder

    def grow(self, tree: AnyTree, inputs: DraftInputs) -> Any:
        self._draft.level_logits = []
        with patch.object(grow_module, "Candidates", RecordingCandidates):
            proposal = super().grow(tree, inputs)
        num_rows, logits = int(inputs.num_computed_tokens[0]), [*self._draft.level_logits]
        if isinstance(tree, Tree):
            whole, tokens = tree, proposal.tokens[0].tolist()
        else:
            candidates = RecordingCandidates.last
            whole, tokens = candidates.considered(int(inputs.roots[0]))
            logits = [
                rows[order] for rows, order in zip(logits, candidates.orders[:-1], strict=True)
            ]
        self._recorder.proposals.append(Proposal(num_rows, whole, tokens, logits))
        return proposal


class RecordingDrafter(EagleDrafter):
    """``recorder``: of its proposals, and of the states of the first sequence."""

    def __init__(
        self, runner: RecordingDraft, manifest: DraftManifest, recorder: Recorder, **options: Any
    ) -> None:
        super().__init__(runner, manifest, **options)
        self._recorder = recorder
        self._grower = RecordingGrower(runner, recorder)

    def _commit_at(self, segments: Any, *args: Any) -> None:
        super()._commit_at(segments, *args)
        self._recorder.states += [(s.stop, s.sequence.draft) for s in segments]

    def keep(self, sequences: Any, *args: Any) -> None:
        super().keep(sequences, *args)
        self._recorder.states += [
            (s.num_draft_computed_tokens, s.draft) for s in sequences if s.draft
        ]


class RecordingCandidates(Candidates):
    """What a dynamic tree considered: as a tree, its inner nodes are those that grew on.

    Attributes:
        orders: of the frontier of every level, by candidate; the last one runs no rows.
    """

    last: RecordingCandidates

    def __init__(self, tokens: Tensor, scores: Tensor) -> None:
        super().__init__(tokens, scores)
        self.orders: list[Tensor] = []
        RecordingCandidates.last = self

    def first(self) -> Frontier:
        self.orders.append(torch.arange(self._tokens[0].shape[1]))
        return super().first()

    def add(self, above: Frontier, tokens: Tensor, log_probs: Tensor) -> Frontier:
        made = super().add(above, tokens, log_probs)
        self.orders.append(made.candidates[0].argsort())
        return made

    def considered(self, root: int) -> tuple[Tree, list[int]]:
        """All candidates and their tokens, the root included."""
        topk = self._tokens[0].shape[1]
        tokens, parents = (
            torch.cat(levels, dim=1)[0].tolist() for levels in (self._tokens, self._parents)
        )
        ranks = [i % topk for i in range(len(tokens))]
        return Tree((-1, *(parent + 1 for parent in parents)), (0, *ranks)), [root, *tokens]


@dataclass(frozen=True)
class Pair:
    """Target and draft with open sessions. ``tables``: token tables of target and draft."""

    target: Target
    draft: Eagle3Reference
    tables: tuple[EmbeddingTable, EmbeddingTable]
    sessions: dict[str, OnnxRuntimeSession]

    @property
    def d2t(self) -> Tensor | None:
        return self.draft.weights.get("d2t")

    def decoder(
        self,
        recorder: Recorder,
        max_seq_len: int,
        drafter: Drafter | None = None,
        *,
        fixed_shapes: bool = False,
        run_ahead: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Decoder:
        session = self.sessions["target"]
        states = layer_states(session.states, NUM_PAGES * PAGE_SIZE)
        runner = RecordingTarget(
            session, states, self.tables[0], self.target.spec.num_visual_levels
        )
        runner.recorder = recorder
        return Decoder(
            runner,
            drafter,
            max_seq_len=max_seq_len,
            prefill_chunk=prefill_chunk,
            fixed_shapes=fixed_shapes,
            run_ahead=run_ahead,
        )

    def drafter(
        self,
        recorder: Recorder,
        *,
        fixed_shapes: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        **changes: Any,
    ) -> RecordingDrafter:
        """``changes``: fields in which the decoder is told a wrong manifest."""
        session = self.sessions["draft"]
        states = layer_states(session.states, NUM_PAGES * PAGE_SIZE)
        runner = RecordingDraft(self.sessions["fuse"], session, states, self.tables[1], self.d2t)
        manifest = dataclasses.replace(self.draft.manifest, **changes)
        options = {"max_rows": prefill_chunk, "fixed_shapes": fixed_shapes}
        return RecordingDrafter(runner, manifest, recorder, **options)

    def sequence(self, prompt: Prompt, pool: PagePool, *, drafting: bool = False) -> SequenceState:
        return SequenceState(prompt, pool, VOCAB, drafting=drafting)


def make_pair(directory: Path, seed: int = 0, **fields: Any) -> Pair:
    """A pair whose draft has ``fields`` of its manifest."""
    target = random_target(directory, text={"vocab_size": VOCAB}, seed=seed)
    draft = random_draft(
        directory, seed=seed + 1, **{"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, **fields}
    )
    m = draft.manifest
    if m.head == "target":
        head = target.spec.tensors["lm_head.weight"]
        weights = {**draft.weights, "lm_head.weight": target.model.lm_head.weight.detach()}
        m = dataclasses.replace(m, tensors={**m.tensors, "lm_head.weight": head})
        draft = Eagle3Reference(m, weights)
    models = {
        "target": target_graph(
            target.spec, m.aux_layers, m.aux_pre_deepstack, "float32", PAGE_SIZE, file_name
        ),
        "fuse": fuse_graph(m, "float32", file_name),
        "draft": draft_graph(m, "float32", PAGE_SIZE, file_name),
    }
    sessions = {}
    for name, model in models.items():
        path = directory / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        sessions[name] = OnnxRuntimeSession(path, directory)
    table = EmbeddingTable(target.spec.tensors["embed_tokens.weight"], torch.float32)
    own = (
        EmbeddingTable(m.tensors["embed_tokens.weight"], torch.float32)
        if m.embedding == "own"
        else table
    )
    return Pair(target, draft, (table, own), sessions)


def make_prompt(pair: Pair, layout: list[int | tuple[int, int]], seed: int = 0) -> Prompt:
    """A prompt of text runs (their lengths) and images (their rows and columns of visual
    tokens).
    """
    generator = torch.Generator().manual_seed(seed)
    positions: list[Tensor] = []
    visual: list[bool] = []
    current = 0
    for part in layout:
        if isinstance(part, int):
            positions.append(torch.arange(current, current + part).expand(3, -1))
            visual += [False] * part
            current += part
        else:
            rows, columns = part
            down, right = (
                torch.arange(rows).repeat_interleave(columns),
                torch.arange(columns).repeat(rows),
            )
            positions.append(current + torch.stack([torch.zeros_like(down), down, right]))
            visual += [True] * (rows * columns)
            current += max(rows, columns)
    count, num_visual = len(visual), sum(visual)
    spec = pair.target.spec
    token_ids = torch.randint(0, VOCAB, (count,), generator=generator)
    token_ids[torch.tensor(visual)] = spec.vision.image_token_id
    vision = Vision(
        torch.randn(num_visual, spec.hidden_size, generator=generator),
        torch.randn(spec.num_visual_levels, num_visual, spec.hidden_size, generator=generator),
    )
    return Prompt(
        token_ids=token_ids,
        position_ids=torch.cat(positions, dim=1).int(),
        rope_delta=current - count,
        visual_rows=torch.tensor(visual),
        vision=vision,
    )


def shuffled_pool(seed: int = 0) -> PagePool:
    """A pool whose pages come in no order, as after many requests."""
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    pages = pool.take(pool.num_free)
    random.Random(seed).shuffle(pages)
    pool.give_back(pages)
    return pool


@dataclass(frozen=True)
class Run:
    """Passes (tokens of each) of one run and its record."""

    pair: Pair
    prompt: Prompt
    passes: list[tuple[int, ...]]
    recorder: Recorder
    manifest: DraftManifest

    @property
    def tokens(self) -> list[int]:
        return [token for tokens in self.passes for token in tokens]


def run(
    pair: Pair,
    prompt: Prompt,
    tree: AnyTree | None,
    num_tokens: int = 36,
    max_seq_len: int = 96,
    **changes: Any,
) -> Run:
    """Decode at least ``num_tokens`` tokens, plainly where ``tree`` is None."""
    recorder, pool = Recorder(), shuffled_pool()
    drafter = pair.drafter(recorder, **changes) if tree else None
    decoder = pair.decoder(recorder, max_seq_len, drafter)
    generator = decoder.run(pair.sequence(prompt, pool, drafting=bool(tree)), tree)
    passes: list[tuple[int, ...]] = []
    for tokens in _until(generator, num_tokens):
        passes.append(tokens)
    assert pool.num_free == NUM_PAGES - 1, "pages leaked"
    return Run(pair, prompt, passes, recorder, pair.draft.manifest)


def _until(generator: Iterator[tuple[int, ...]], num_tokens: int) -> Iterator[tuple[int, ...]]:
    count = 0
    for tokens in generator:
        yield tokens
        count += len(tokens)
        if count >= num_tokens:
            break
    generator.close()
