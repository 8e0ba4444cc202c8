"""A random Qwen3.5 under the scheduler, with a draft that is often right: what is accepted is
committed to the states of its recurrent layers, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decode.hybrid import (
    KINDS,
    LAYOUTS,
    SESSIONS,
    Hybrid,
    all_free,
    check_batches,
    check_preemption,
    hybrid,
)
from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import TREES
from trt_eagle3.decode.memory import recurrent
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.memory.state import layer_states


@pytest.fixture
def pair() -> Hybrid:
    return hybrid()


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Hybrid:
    """A dense pair and one that is a mixture of experts."""
    return hybrid(request.param)


@torch.no_grad()
def test_tokens_are_those_of_transformers(both: Hybrid) -> None:
    ids = both.prompts[2].token_ids
    model: Any = both.pair.target.model
    found = torch.cat([ids, torch.tensor(both.alone(2))])
    best = model(input_ids=found[None]).logits[0, len(ids) - 1 : -1].argmax(-1)
    assert best.tolist() == both.alone(2)
    assert len(set(both.alone(2))) > 2


@pytest.mark.parametrize("backend", SESSIONS)
@pytest.mark.parametrize("tree", TREES)
def test_speculation_in_batches_answers_as_decoding_alone(
    both: Hybrid, tree: str, backend: str
) -> None:
    check_batches(both, tree, backend)


def test_preempted_sequences_and_reused_prefixes_answer_alike(both: Hybrid) -> None:
    check_preemption(both)


def test_snapshots_are_owners_and_not_copies(pair: Hybrid) -> None:
    pool, states = PagePool(NUM_PAGES, PAGE_SIZE), pair.make_states(1)
    a, b = (pair.pair.sequence(pair.prompts[0], pool) for _ in range(2))
    states.reserve(a)
    states.inputs([a], [3])
    states.swap_entries([a])
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


def test_a_forward_that_failed_can_be_run_again(pair: Hybrid) -> None:
    """It wrote an entry that nobody reads."""
    states = pair.make_states()
    sequence = pair.pair.sequence(pair.prompts[0], PagePool(NUM_PAGES, PAGE_SIZE))
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


def _replay_by(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """``change``: of a path, giving its counts."""
    right = RecurrentStates.to_replay

    def wrong(self: RecurrentStates, inputs: Any, path: Tensor, counts: Tensor) -> Any:
        return right(self, inputs, path, change(path, counts))

    return wrong


def _late_window(state: Tensor, rows: Tensor, entries: Tensor, path: Tensor) -> None:
    recurrent.commit_window(state, rows, entries, path.roll(-1, 1).index_fill(1, _last(path), -1))


def _last(path: Tensor) -> Tensor:
    return torch.tensor([path.shape[1] - 1])


def _of_another(self: RecurrentStates, *args: Any) -> Mapping[str, Tensor]:
    found = _inputs(self, *args)
    return {**found, "state_reads": found["state_reads"].roll(1)}


_inputs = RecurrentStates.inputs
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "committed a token short": lambda m: m.setattr(
        RecurrentStates, "to_replay", _replay_by(lambda _, counts: (counts - 1).clamp(min=1))
    ),
    "committed a token long": lambda m: m.setattr(
        RecurrentStates,
        "to_replay",
        _replay_by(lambda path, counts: (counts + 1).clamp(max=path.shape[1])),
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
def test_fault_changes_answers(pair: Hybrid, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [pair.alone(i) for i in range(len(LAYOUTS))]
    FAULTS[fault](monkeypatch)
    scheduler = pair.make_scheduler(pair.make_states())
    found = pair.answers(scheduler, PagePool(NUM_PAGES, PAGE_SIZE), range(len(LAYOUTS)))
    assert found != expected


def _save_what_is_written_next(self: RecurrentStates, sequence: SequenceState) -> Any:
    held = self._held[sequence]
    return recurrent._EntrySnapshot(self, self._entries.share(held.write))


@pytest.mark.parametrize("late", [False, True])
def test_prompt_that_comes_again_begins_from_its_snapshot_and_not_from_a_later_one(
    pair: Hybrid, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pair.alone(3)
    if late:
        monkeypatch.setattr(RecurrentStates, "save", _save_what_is_written_next)
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    scheduler = pair.make_scheduler(pair.make_states(40), "plain", PrefixCache(pool))
    pair.answers(scheduler, pool, [3])
    found = pair.answers(scheduler, pool, [3])
    assert scheduler.num_reused_rows > 0
    assert (found == [expected]) is not late
