"""A recurrent layer beside the tiny pair's target: its state is a running hash of the rows.

Shapes: B sequences, S rows of each, M masked tail, R rows wanted from the head, V vocab.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, PREFILL_CHUNK, VOCAB, Recorder
from tests.decode.scheduling import MAX_BATCH, MAX_SEQ_LEN, TreeFor, pair
from trt_eagle3.decode.forward.device_batch import DeviceBatch
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.decode.memory.state import Commit, LayerStates, PagedStates
from trt_eagle3.decode.policy.protocol import BatchState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.draft_ahead import DraftAhead
from trt_eagle3.decode.speculation.propose import Proposal
from trt_eagle3.decode.step.decoder import AnyTree, Decoder
from trt_eagle3.engine.session import Session

__all__ = ["ANSWERS", "CommitBy", "HashStates", "make_decoder", "make_scheduler"]

CommitBy = Literal["select", "replay"]
ANSWERS: dict[int, list[int]] = {}
"""What prompts (by ``id``) are known to be answered: proposals are often right about them."""
_NOISE = 0.4  # how far the state moves a logit


def follow(state: bytes, row: Tensor) -> bytes:
    """The state after one more row, ``[H]``."""
    return blake2b(state + row.numpy().tobytes(), digest_size=8).digest()


class HashStates:
    """Implements ``PerSequenceStates``: an entry is a hash of all rows so far, in order.

    ``commit_by``: as a graph that keeps the state after every new row, or as one that keeps the new
    rows.
    """

    def __init__(self, commit_by: CommitBy, num_snapshots: int) -> None:
        self.entries: dict[SequenceState, int] = {}
        self.num_saved = 0
        self._content = [b"left over"] * MAX_BATCH
        self._commit_by, self._num_snapshots = commit_by, num_snapshots
        self._rows: dict[int, list[Tensor]] = {}  # of the last forward, by entry
        self._after: dict[int, list[bytes]] = {}

    def content(self, sequence: SequenceState) -> bytes:
        return self._content[self.entries[sequence]]

    def bind(self, session: Session) -> None:
        """The layer stands beside the graph."""

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """The rows are taken in ``forward``."""

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        certain: Sequence[int],
        size: int | None = None,
    ) -> dict[str, Tensor]:
        assert size in (None, len(sequences)), "cycles of these states know what stays"
        del certain
        return {"entries": torch.tensor([self.entries[s] for s in sequences])}

    def reserve(self, sequence: SequenceState) -> None:
        if sequence not in self.entries:
            free = set(range(MAX_BATCH)) - set(self.entries.values())
            self.entries[sequence] = min(free)
            self._content[min(free)] = b""

    def release(self, sequence: SequenceState) -> None:
        self.entries.pop(sequence, None)

    def forward(self, entry: int, rows: Sequence[Tensor], parents: Sequence[int]) -> list[bytes]:
        """The states after ``rows`` [S][H] of one sequence, its entry as it was."""
        after: list[bytes] = []
        for row, parent in zip(rows, parents, strict=True):
            after.append(follow(self._content[entry] if parent < 0 else after[parent], row))
        self._rows[entry], self._after[entry] = list(rows), after
        return after

    def commit(self, commits: Sequence[Commit]) -> None:
        for c in commits:
            entry = self.entries[c.sequence]
            rows, after = self._rows.pop(entry), self._after.pop(entry)
            if self._commit_by == "select" and c.path:
                self._content[entry] = after[c.path[-1]]
            elif self._commit_by == "replay":
                for node in c.path:
                    self._content[entry] = follow(self._content[entry], rows[node])

    def replay(self, *_: object) -> None:
        raise AssertionError("the host knows what stays")

    def hand_on(self, *_: object) -> None:
        raise AssertionError("commit does that")

    def save(self, sequence: SequenceState) -> Snapshot | None:
        return HashSnapshot(self, self.content(sequence)) if self.has_room else None

    @property
    def has_room(self) -> bool:
        return self.num_saved < self._num_snapshots

    def restore(self, sequence: SequenceState, snapshot: Snapshot) -> None:
        assert isinstance(snapshot, HashSnapshot)
        self.reserve(sequence)
        self._content[self.entries[sequence]] = snapshot.content


class HashSnapshot:
    """A copy of an entry, released once."""

    def __init__(self, states: HashStates, content: bytes) -> None:
        states.num_saved += 1
        self.content = content
        self._states: HashStates | None = states

    def release(self) -> None:
        assert self._states is not None, "released already"
        self._states.num_saved -= 1
        self._states = None


class RecurrentTarget(TargetRunner):
    """The target, whose logits the recurrent layer's state moves."""

    recurrent: HashStates

    def forward(
        self,
        embeds: Tensor,
        metadata: AttentionMetadata,
        logit_rows: Tensor,
        visual_levels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = dict(metadata.state_inputs)
        entries = inputs.pop("entries").tolist()
        assert len(set(entries)) == len(entries) == len(embeds)
        plain = dataclasses.replace(metadata, state_inputs=inputs)
        logits, aux = super().forward(embeds, plain, logit_rows, visual_levels)
        for b, (entry, count) in enumerate(zip(entries, metadata.counts, strict=True)):
            parents = [_parent(metadata.mask[b, i, :], i) for i in range(count)]
            after = self.recurrent.forward(entry, list(embeds[b, :count]), parents)
            for r, row in enumerate(logit_rows[b].tolist()):
                if row < count:
                    logits[b, r] += _noise(after[row])
        return logits, aux


def _parent(seen: Tensor, row: int) -> int:
    """The last row before ``row`` that it sees; -1: none."""
    return int(max(seen[:row].nonzero().flatten().tolist(), default=-1))


def _noise(state: bytes) -> Tensor:
    return torch.tensor(list(blake2b(state, digest_size=VOCAB).digest())) * (_NOISE / 255)


class GuessingDecoder(Decoder):
    """Puts what will be said into some path of a tree, for the tiny draft is rarely right."""

    def _propose(self, sequences: Sequence[SequenceState], tree: AnyTree | None) -> Proposal | None:
        proposal = super()._propose(sequences, tree)
        return None if proposal is None else _with_guesses(proposal, sequences)


class GuessingDraft(DraftAhead):
    """``GuessingDecoder`` of asynchronous cycles."""

    def proposal(
        self, sequences: Sequence[SequenceState], tree: AnyTree, batch: DeviceBatch
    ) -> Proposal:
        return _with_guesses(super().proposal(sequences, tree, batch), sequences)


def _with_guesses(proposal: Proposal, sequences: Sequence[SequenceState]) -> Proposal:
    """What ``sequences`` are known to say next in some path of their trees, the same one whenever
    they have said as much.
    """
    tokens = proposal.tokens.clone()
    for b, s in enumerate(sequences):
        following = ANSWERS.get(id(s.prompt), [])[len(s.tokens) :]
        chance = random.Random(len(s.tokens) * VOCAB + s.tokens[-1])
        _guess(tokens[b], proposal.parents[b].tolist(), following, chance)
    return dataclasses.replace(proposal, tokens=tokens)


def _guess(tokens: Tensor, parents: list[int], following: list[int], chance: random.Random) -> None:
    node = 0
    for token in following:
        children = [child for child, parent in enumerate(parents) if parent == node]
        if not children or chance.random() < 0.2:
            return
        node = chance.choice(children)
        for child in children:  # siblings differ
            if tokens[child] == token:
                tokens[child] = tokens[node]
        tokens[node] = token


def make_decoder(states: HashStates) -> Decoder:
    """The pair's decoder with the recurrent layer in its target."""
    session = pair().sessions["target"]
    layers = LayerStates(PagedStates(session.states, NUM_PAGES * PAGE_SIZE), states)
    visual_levels = pair().target.spec.num_visual_levels
    target = RecurrentTarget(session, layers, pair().tables[0], visual_levels)
    target.recurrent = states
    drafting = pair().drafting(Recorder())
    sizes = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": PREFILL_CHUNK}
    return GuessingDecoder(target, drafting, **sizes)


class CheckedScheduler(Scheduler):
    """After every step, every running sequence's state is that of its rows, and nobody else has
    one.
    """

    recurrent: HashStates

    def step(self) -> list[Emission]:
        emissions = super().step()
        self.check()
        return emissions

    def check(self) -> None:
        assert set(self.recurrent.entries) == set(self.running), "entries of others"
        for s in self.running:
            assert self.recurrent.content(s) == self.true_state(s), f"state after {s.length} rows"

    @staticmethod
    def true_state(sequence: SequenceState) -> bytes:
        embeds = pair().tables[0].lookup(sequence.ids(0, sequence.length))
        prompt: Prompt = sequence.prompt
        prompt.put_visual(embeds, 0)
        state = b""
        for row in embeds:
            state = follow(state, row)
        return state


def make_scheduler(
    states: HashStates,
    prefixes: PrefixCache | None,
    tree_for: Callable[[BatchState], AnyTree | None],
) -> CheckedScheduler:
    """A scheduler over ``make_decoder``."""
    options: dict[str, Any] = {"max_batch_size": MAX_BATCH, "prefix_cache": prefixes}
    scheduler = CheckedScheduler(make_decoder(states), policy=TreeFor(tree_for), **options)
    scheduler.recurrent = states
    return scheduler
