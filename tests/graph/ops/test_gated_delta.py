"""``GatedDelta`` against a float64 recurrence that follows every row's own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.graph.ops.gated_delta_case import (
    FAULTS,
    Case,
    chain,
    expected,
    make_case,
    take,
)
from tests.graph.ops.one_node import run_op
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.graph.ops import OPS
from trt_eagle3.graph.ops.gated_delta import (
    TREE_ROWS,
    gated_delta,
    replay_delta,
    replay_window,
)
from trt_eagle3.parity.metrics import relative_error

Run = Callable[..., dict[str, Tensor]]


def by_torch(inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    found = gated_delta(*(x.clone() for x in inputs.values()), **attributes)
    return dict(zip(OPS["GatedDelta"].outputs[""], found, strict=True))


def by_lowering(inputs: dict[str, Tensor], **attributes: Any) -> dict[str, Tensor]:
    return run_op("GatedDelta", "", inputs, **attributes)


RUNS: dict[str, Run] = {"torch": by_torch, "lowering": by_lowering}


def computed(run: Run, case: Case) -> dict[str, Tensor]:
    return run(case.inputs, **case.attributes)


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(relative_error(found[name].double(), x) for name, x in wanted.items())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch, new = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    parents = [[-1, *(draw(st.integers(0, i - 1)) for i in range(1, new))] for _ in range(batch)]
    chains = [next((i for i, p in enumerate(above) if p != i - 1), new) for above in parents]
    certain = [draw(st.integers(0, chain)) for chain in chains]
    heads = draw(st.sampled_from([(1, 1), (2, 4), (1, 3)]))
    return make_case(parents, certain, heads, draw(st.integers(2, 5)), draw(st.integers(0, 99)))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@settings(max_examples=20)
@given(case=cases())
def test_every_row_follows_its_path(run: Run, case: Case) -> None:
    assert worst(computed(run, case), expected(case)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_long_chains_go_through_the_state(run: Run) -> None:
    new = 2 * TREE_ROWS + 7
    case = make_case([chain(new)] * 2, [new, TREE_ROWS + 3], (2, 4), 4, 0)
    wanted = expected(case)
    found = computed(run, case)
    assert worst(found, wanted) < FLOAT32_TOLERANCE
    assert found["delta_rows"].shape[1] == found["conv_rows"].shape[1] == TREE_ROWS


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_entries_that_nobody_writes_stay(run: Run) -> None:
    case = make_case([[-1, 0, 0]], [1], (2, 4), 4, 3)
    found = computed(run, case)
    write = int(case.inputs["state_writes"][0])
    for name in ("conv_state", "delta_state"):
        kept = [e for e in range(len(case.inputs[name])) if e != write]
        assert torch.equal(found[f"{name}_out"][kept], case.inputs[name][kept])


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2, 4), (0, 1, 3)])
def test_replay_of_a_path_is_the_state_after_it(run: Run, path: tuple[int, ...]) -> None:
    parents = [-1, 0, 0, 1, 2, 1]
    case = make_case([parents], [1], (2, 4), 4, 5)
    found = computed(run, case)
    write = int(case.inputs["state_writes"][0])
    rows, counts = torch.tensor([list(path[1:]) or [0]]), torch.tensor([len(path) - 1])
    window, state = (
        replay(found[f"{name}_state_out"][[write]], found[f"{name}_rows"][[[0]], rows], counts)
        for replay, name in ((replay_window, "conv"), (replay_delta, "delta"))
    )
    alone = take(case, list(path))
    wanted = expected(alone)
    assert relative_error(state[0].double(), wanted["delta_state_out"][write]) < FLOAT32_TOLERANCE
    assert relative_error(window[0].double(), wanted["conv_state_out"][write]) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    case = make_case([[-1, 0, 0, 1], [-1, 0, 1, 0]], [1, 2], (2, 4), 4, 7)
    found = computed(by_torch, FAULTS[fault](case))
    assert worst(found, expected(case)) > FAULT_FLOOR * FLOAT32_TOLERANCE
