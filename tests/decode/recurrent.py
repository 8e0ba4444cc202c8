"""A recurrent layer beside the tiny pair's target: its state is a running hash of the rows.

Shapes: B sequences, S rows of each, M masked tail, R rows of logits, V vocab.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from tests.decode.pair import NUM_PAGES, PAGE_SIZE, PREFILL_CHUNK, VOCAB, Pair, Recorder
from tests.decode.scheduling import MAX_BATCH, MAX_SEQ_LEN, TreeFor, pair
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState, Snapshot
from trt_eagle3.decode.memory.state import LayerStates, PagedStates
from trt_eagle3.decode.policy.protocol import BatchState
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.schedule.scheduler import Scheduler
from trt_eagle3.decode.speculation.eagle import EagleDrafter
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.speculation.tree import AnyTree
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.engine.runtime.session import Reduction

__all__ = ["ANSWERS", "HashStates", "guessing", "make_decoder", "make_scheduler"]

ANSWERS: dict[int, list[int]] = {}
"""What prompts (by ``id``) are known to be answered: proposals are often right about them."""
_NOISE = 0.4  # how far the state moves a logit


def follow(state: bytes, row: Tensor) -> bytes:
    """The state after one more row, ``[H]``."""
    return blake2b(state + row.numpy().tobytes(), digest_size=8).digest()


class HashStates:
    """In place of ``RecurrentStates``: an entry is a hash of all rows so far, in order."""

    max_tree_nodes = 64

    def __init__(self, num_snapshots: int) -> None:
        self.entries: dict[SequenceState, int] = {}
        self.num_saved = 0
        self.num_replayed = Counter[int]()  # rows of each path
        self._content = [b"left over"] * MAX_BATCH
        self._written = [b"left over"] * MAX_BATCH  # by the last forward
        self._num_snapshots = num_snapshots
        self._certain: dict[int, int] = {}
        self._rows: dict[int, list[Tensor]] = {}  # of the last forward, by entry

    def content(self, sequence: SequenceState) -> bytes:
        return self._content[self.entries[sequence]]

    def bindings(self) -> Iterator[tuple[str, Tensor]]:
        """The layer stands beside the graph."""
        return iter(())

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """The rows are taken in ``forward``."""

    def inputs(
        self,
        sequences: Sequence[SequenceState],
        certain: Sequence[int],
        size: int | None = None,
    ) -> dict[str, Tensor]:
        assert size in (None, len(sequences)), "batches of these states have no padding"
        entries = [self.entries[s] for s in sequences]
        self._certain = dict(zip(entries, certain, strict=True))
        return {"entries": torch.tensor(entries)}

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
        self._rows[entry], self._written[entry] = list(rows), after[self._certain[entry] - 1]
        return after

    def to_replay(
        self, inputs: Mapping[str, Tensor], path: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        place = torch.arange(path.shape[1])
        return inputs["entries"], path.masked_fill(place >= counts[:, None], -1)[:, 1:]

    def replay(self, entries: Tensor, path: Tensor) -> None:
        for row, entry in enumerate(entries.tolist()):
            nodes = [node for node in path[row].tolist() if node >= 0]
            self.num_replayed[1 + len(nodes)] += 1
            for node in nodes:
                self._written[entry] = follow(self._written[entry], self._rows[entry][node])

    def swap_entries(self, sequences: Sequence[SequenceState]) -> None:
        for s in sequences:
            self._content[self.entries[s]] = self._written[self.entries[s]]

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
        reduce: Reduction | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = dict(metadata.state_inputs)
        entries = inputs.pop("entries").tolist()
        assert len(set(entries)) == len(entries) == len(embeds)
        plain = dataclasses.replace(metadata, state_inputs=inputs)
        logits, aux = super().forward(embeds, plain, logit_rows, visual_levels)
        for b, (entry, number) in enumerate(zip(entries, metadata.counts, strict=True)):
            count = int(number)
            parents = [_parent(metadata.mask[b, i, :], i) for i in range(count)]
            after = self.recurrent.forward(entry, list(embeds[b, :count]), parents)
            for r, row in enumerate(logit_rows[b].tolist()):
                if row < count:
                    logits[b, r] += _noise(after[row])
        return reduce(logits) if reduce else logits, aux


def _parent(seen: Tensor, row: int) -> int:
    """The last row before ``row`` that it sees; -1: none."""
    return int(max(seen[:row].nonzero().flatten().tolist(), default=-1))


def _noise(state: bytes) -> Tensor:
    return torch.tensor(list(blake2b(state, digest_size=VOCAB).digest())) * (_NOISE / 255)


class GuessingDrafter(EagleDrafter):
    """Puts what will be emitted into some path of a tree, for the tiny draft is rarely right."""

    def propose(self, sequences: Sequence[SequenceState], *args: Any) -> Proposal:
        return _with_guesses(super().propose(sequences, *args), sequences)


def guessing(pair: Pair, **options: Any) -> GuessingDrafter:
    """The pair's draft, as ``GuessingDrafter``."""
    drafter = pair.drafter(Recorder())
    return GuessingDrafter(
        drafter.runner, drafter.manifest, **{"max_rows": PREFILL_CHUNK, **options}
    )


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
    sizes = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": PREFILL_CHUNK}
    return Decoder(target, guessing(pair()), **sizes)


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
            assert self.recurrent.content(s) == self.true_state(s), (
                f"state after {s.num_computed_tokens} rows"
            )

    @staticmethod
    def true_state(sequence: SequenceState) -> bytes:
        embeds = pair().tables[0].lookup(sequence.ids(0, sequence.num_computed_tokens))
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
