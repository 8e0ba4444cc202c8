"""A random Qwen3.5 under the scheduler, with a draft that is often right: what is accepted is
committed to the states of its recurrent layers, and nothing else.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.pair import (
    DRAFT_VOCAB,
    NUM_PAGES,
    PAGE_SIZE,
    PREFILL_CHUNK,
    VOCAB,
    Pair,
    Recorder,
)
from tests.decode.recurrent import ANSWERS, GuessingDecoder
from tests.decode.scheduling import MAX_BATCH, MAX_SEQ_LEN, MAX_TOKENS, TREES, finish, prompts_of
from tests.hybrid import save_qwen3_5
from tests.reference.checkpoint import file_name, random_draft
from tests.reference.target import Target
from trt_eagle3.decode import recurrent
from trt_eagle3.decode.commit import Commit
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.prefix_cache import PrefixCache
from trt_eagle3.decode.prompt import Prompt
from trt_eagle3.decode.recurrent import RecurrentStates
from trt_eagle3.decode.runner import TargetRunner
from trt_eagle3.decode.scheduler import Scheduler
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.state import LayerStates, PagedStates, layer_states
from trt_eagle3.engine.embedding import EmbeddingTable
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.draft import draft_graph, fuse_graph
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.reference.draft import ReferenceDraft

LAYOUTS: list[list[Any]] = [[9], [3, (2, 3), 2, (2, 2), 3], [17], [33]]
ROOM = 6  # snapshots
SESSIONS = {"onnxruntime": OnnxRuntimeSession, "torch": TorchSession}


@cache
def pair() -> Pair:
    """A Qwen3.5 and a draft of its width, with ONNX Runtime's sessions of the draft."""
    directory = Path(mkdtemp(prefix="trt-eagle3-test-"))
    model: Any = save_qwen3_5(directory, vocab_size=VOCAB, seed=3)
    spec = read_target(directory)
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    draft: ReferenceDraft = random_draft(directory, seed=1, **sizes)
    m = draft.manifest
    graphs = {
        "target": target_graph(spec, m.aux_layers, False, "float32", PAGE_SIZE, file_name),
        "fuse": fuse_graph(m, "float32", file_name),
        "draft": draft_graph(m, "float32", PAGE_SIZE, file_name),
    }
    sessions = {}
    for name, graph in graphs.items():
        (directory / f"{name}.onnx").write_bytes(graph.SerializeToString())
        sessions[name] = OnnxRuntimeSession(directory / f"{name}.onnx", directory)
    table = EmbeddingTable(spec.tensors["embed_tokens.weight"], torch.float32)
    return Pair(Target(model, spec), draft, (table, table), sessions)


@cache
def prompts() -> tuple[Prompt, ...]:
    return prompts_of(pair(), LAYOUTS)


def make_decoder(states: RecurrentStates, backend: str = "onnxruntime") -> GuessingDecoder:
    path = pair().target.spec.path
    session = SESSIONS[backend](path / "target.onnx", path)
    paged = [s for s in session.states if s.kind == "paged"]
    layers = LayerStates(PagedStates(paged, NUM_PAGES * PAGE_SIZE), states)
    target = TargetRunner(session, layers, pair().tables[0], 0)
    sizes = {"max_seq_len": MAX_SEQ_LEN, "prefill_chunk": PREFILL_CHUNK}
    decoder = GuessingDecoder(target, pair().drafting(Recorder()), **sizes)
    decoder.chance = random.Random(0)
    return decoder


def make_states(num_snapshots: int = 0) -> RecurrentStates:
    kept = [s for s in pair().sessions["target"].states if s.kind != "paged"]
    return RecurrentStates(kept, MAX_BATCH, num_snapshots)


@cache
def alone(index: int) -> list[int]:
    """What a prompt is answered alone, without speculation."""
    sequence = pair().sequence(prompts()[index], PagePool(NUM_PAGES, PAGE_SIZE))
    tokens: list[int] = []
    for some in make_decoder(make_states()).run(sequence):
        tokens += some
        if len(tokens) >= MAX_TOKENS:
            break
    ANSWERS[id(prompts()[index])] = tokens[:MAX_TOKENS]
    return tokens[:MAX_TOKENS]


def make_scheduler(
    states: RecurrentStates,
    tree: str = "bushy",
    prefixes: PrefixCache | None = None,
    backend: str = "onnxruntime",
) -> Scheduler:
    return Scheduler(
        make_decoder(states, backend),
        max_batch_size=MAX_BATCH,
        tree_for=lambda _: TREES[tree],
        prefix_cache=prefixes,
    )


def answers(scheduler: Scheduler, pool: PagePool, indices: Sequence[int]) -> list[list[int]]:
    """What prompts that draft say together."""
    asked = [pair().sequence(prompts()[i], pool, drafting=True) for i in indices]
    for s in asked:
        scheduler.add(s)
    output_ids = finish(scheduler)
    return [output_ids[id(s)][:MAX_TOKENS] for s in asked]


def all_free(states: RecurrentStates) -> bool:
    """Whether nobody owns an entry but that of no token."""
    owners: list[int] = states._entries._owners
    return owners[0] == 1 and not any(owners[1:])


@torch.no_grad()
def test_tokens_are_those_of_transformers() -> None:
    ids = prompts()[2].token_ids
    model: Any = pair().target.model
    found = torch.cat([ids, torch.tensor(alone(2))])
    best = model(input_ids=found[None]).logits[0, len(ids) - 1 : -1].argmax(-1)
    assert best.tolist() == alone(2)
    assert len(set(alone(2))) > 2


@pytest.mark.parametrize("backend", SESSIONS)
@pytest.mark.parametrize("tree", TREES)
def test_speculation_in_batches_answers_as_decoding_alone(tree: str, backend: str) -> None:
    expected = [alone(i) for i in range(len(LAYOUTS))]
    states = make_states()
    scheduler = make_scheduler(states, tree, backend=backend)
    assert answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), range(len(LAYOUTS))) == expected
    assert all_free(states)


def test_preempted_sequences_and_reused_prefixes_answer_alike() -> None:
    expected = [alone(i) for i in (1, 2)]
    pool = PagePool(16, PAGE_SIZE)  # both begin, one can end
    prefixes, states = PrefixCache(pool), make_states(ROOM)
    scheduler = make_scheduler(states, prefixes=prefixes)
    assert answers(scheduler, pool, (1, 2)) == expected
    assert scheduler.num_preempted > 0
    assert answers(scheduler, pool, (2, 1)) == expected[::-1]
    assert scheduler.num_reused_rows > 0
    prefixes.clear()
    assert all_free(states)
    assert states._room == ROOM


def test_snapshots_are_owners_and_not_copies() -> None:
    pool, states = PagePool(NUM_PAGES, PAGE_SIZE), make_states(1)
    a, b = (pair().sequence(prompts()[0], pool) for _ in range(2))
    states.reserve(a)
    states.inputs([a], [3])
    states.commit([Commit(a, 0, range(3))])
    snapshot = states.save(a)
    assert snapshot is not None
    assert states.save(a) is None
    states.restore(b, snapshot)
    reads = states.inputs([a, b], [1, 1])["state_reads"].tolist()
    assert reads[0] == reads[1] != 0
    states.release(a)
    states.release(b)
    assert not all_free(states)
    snapshot.release()
    assert all_free(states)


def test_a_forward_that_failed_can_be_run_again() -> None:
    """It wrote an entry that nobody reads."""
    states = make_states()
    sequence = pair().sequence(prompts()[0], PagePool(NUM_PAGES, PAGE_SIZE))
    states.reserve(sequence)
    first = states.inputs([sequence], [5])
    assert {n: x.tolist() for n, x in states.inputs([sequence], [5]).items()} == {
        n: x.tolist() for n, x in first.items()
    }
    assert first["state_reads"].item() != first["state_writes"].item()


def test_allocation_that_fails_is_told_in_one_line() -> None:
    from trt_eagle3.errors import UserError
    from trt_eagle3.spec import StateSpec

    huge = StateSpec("delta_state.0", "delta", (1 << 12, 1 << 12, 1 << 12), "float32")
    with pytest.raises(UserError, match=r"^delta_state\.0: .* need more memory") as caught:
        layer_states([StateSpec("k_cache.0", "paged", (1, 2), "float32"), huge], 8)
    assert "\n" not in str(caught.value)


# Planted faults


def _commit_with(path: Callable[[Sequence[int]], Sequence[int]]) -> Callable[..., None]:
    right = RecurrentStates.commit

    def commit(self: RecurrentStates, commits: Sequence[Commit]) -> None:
        wrong = [
            c if isinstance(c.path, range) else dataclasses.replace(c, path=path(c.path))
            for c in commits
        ]
        right(self, wrong)

    return commit


def _late_window(window: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return recurrent.replay_window(window, rows, (counts - 1).clamp(min=0))


def _of_another(self: RecurrentStates, *args: Any) -> Mapping[str, Tensor]:
    found = _inputs(self, *args)
    return {**found, "state_reads": found["state_reads"].roll(1)}


_inputs = RecurrentStates.inputs
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "committed a token short": lambda m: m.setattr(
        RecurrentStates, "commit", _commit_with(lambda p: p[:-1] if len(p) > 1 else p)
    ),
    "committed a token long": lambda m: m.setattr(
        RecurrentStates, "commit", _commit_with(lambda p: (*p, p[-1] + 1) if 1 < len(p) < 4 else p)
    ),
    "convolution's window off by one": lambda m: m.setitem(
        dict_of(recurrent), "window", _late_window
    ),
    "state of another sequence": lambda m: m.setattr(RecurrentStates, "inputs", _of_another),
}


def dict_of(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = module._REPLAYS
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_changes_answers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [alone(i) for i in range(len(LAYOUTS))]
    FAULTS[fault](monkeypatch)
    scheduler = make_scheduler(make_states())
    found = answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), range(len(LAYOUTS)))
    assert found != expected


def _save_what_is_written_next(self: RecurrentStates, sequence: SequenceState) -> Any:
    held = self._held[sequence]
    return recurrent._EntrySnapshot(self, self._entries.share(held.write))


@pytest.mark.parametrize("late", [False, True])
def test_prompt_that_comes_again_begins_from_its_snapshot_and_not_from_a_later_one(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(3)
    if late:
        monkeypatch.setattr(RecurrentStates, "save", _save_what_is_written_next)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = make_scheduler(make_states(40), "plain", PrefixCache(pool))
    answers(scheduler, pool, [3])
    found = answers(scheduler, pool, [3])
    assert scheduler.num_reused_rows > 0
    assert (found == [expected]) is not late
