"""GatedDelta by tensor cores: prompts and larger trees in 16 bits, against a float64 recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.graph.ops import gated_delta_case
from tests.graph.ops.gated_delta_case import Case, chain, changed, expected
from tests.plugins.test_gated_delta import by_kernel, check_captured, tree, worst

pytestmark = pytest.mark.gpu

# Norm of the difference over the norm of what is expected: a half more than is measured. Operands
# are rounded to T once more than the reference rounds (k, W, U, S, V'), and o after them. No number
# may differ by more than RANGE times as much of the largest one.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
RANGE = 4
FAULT_FLOOR = 4  # times the tolerance
CHUNK, PASS_CHUNKS = 64, 32  # rows of a chunk; chunks of a pass of all sequences
# Hk, Hv; Dk, Dv; W: more value heads than key heads, rows that end in no full tile, 2 to 5 taps
GEOMETRIES = (
    ((2, 4), (128, 128), 4),
    ((1, 3), (64, 36), 2),
    ((1, 1), (20, 12), 5),
    ((2, 2), (100, 68), 3),
)


def make_case(*drawn: Any) -> Case:
    """As ``gated_delta_case``'s, with gates that keep a third of a state over a chunk: what passes
    from chunk to chunk counts.
    """
    case = gated_delta_case.make_case(*drawn)
    return changed(case, a_log=torch.full_like(case.inputs["a_log"], -4))


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Largest ``distance``, and of what."""
    return max((distance(found[n], x), n) for n, x in wanted.items())


def check(case: Case, device: torch.device) -> None:
    found, wanted = by_kernel(case, device), expected(case)
    tolerance = TOLERANCE[case.inputs["qkvz"].dtype]
    error, name = furthest(found, wanted)
    assert error < tolerance, f"{name}: {error:.2e}"
    error, name = worst(found, wanted)
    assert error < RANGE * tolerance, f"{name}: {error:.2e} of the largest"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dims", "width"), GEOMETRIES)
def test_every_geometry_is_right(
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    cuda: torch.device,
) -> None:
    check(make_case([chain(100)] * 2, [100, 70], heads, width, 1, dims, dtype), cuda)
    check(make_case([tree(40, 1), tree(40, 2)], [2, 1], heads, width, 2, dims, dtype), cuda)


@pytest.mark.parametrize("rows", [17, 63, 64, 65, 128, 191])
def test_any_number_of_rows_may_stay(rows: int, cuda: torch.device) -> None:
    """None, one, up to the end of a chunk and around it, all."""
    counts = sorted({0, 1, CHUNK - 1, CHUNK, CHUNK + 1, rows - 1, rows})
    certain = [c for c in counts if c <= rows]
    cases = [chain(rows)] * len(certain)
    entries = 2 * len(certain)
    dtype = torch.bfloat16
    check(make_case(cases, certain, (1, 1), 4, rows, (64, 32), dtype, entries), cuda)


@pytest.mark.parametrize("batch", [1, 2])
def test_states_pass_from_pass_to_pass(batch: int, cuda: torch.device) -> None:
    """Rows that stay up to the first pass, and past it."""
    edge = PASS_CHUNKS // batch * CHUNK
    certain = [edge, edge + 70][:batch] if batch > 1 else [edge + 1]
    rows = edge + CHUNK + 30
    case = make_case([chain(rows)] * batch, certain, (1, 1), 4, 0, (64, 32), torch.bfloat16)
    check(case, cuda)


def test_prompt_in_portions_is_the_prompt(cuda: torch.device) -> None:
    """A later portion goes on from what the one before it wrote."""
    whole = make_case([chain(200)], [200], (1, 2), 4, 1, (128, 128), torch.bfloat16)
    wanted = expected(whole)
    found, inputs = [], dict(whole.inputs)
    read, write = whole.inputs["state_reads"], whole.inputs["state_writes"]
    for begin, end in ((0, 90), (90, 107), (107, 200)):
        some = chain(end - begin)
        portion = {n: whole.inputs[n][begin:end] for n in ("qkvz", "ba")}
        mask = torch.ones(1, len(some), len(some), dtype=torch.bool).tril()
        certain = torch.tensor([len(some)], dtype=torch.int32)
        inputs |= {**portion, "tree_mask": mask, "certain": certain}
        inputs |= {"state_reads": read, "state_writes": write}
        out = by_kernel(Case(inputs, [some], whole.heads), cuda)
        inputs |= {n: out[f"{n}_out"] for n in ("conv_state", "delta_state")}
        read, write = write, read
        found.append(out["out"])
    assert distance(torch.cat(found), wanted["out"]) < TOLERANCE[torch.bfloat16]
    last = int(whole.inputs["state_writes"][0])
    for name in ("conv_state", "delta_state"):
        error = distance(inputs[name][last], wanted[f"{name}_out"][last])
        assert error < TOLERANCE[torch.bfloat16], name


def test_same_inputs_give_the_same_bits(cuda: torch.device) -> None:
    case = make_case([chain(150)] * 2, [150, 3], (2, 4), 4, 3, (128, 128), torch.bfloat16)
    first, second = by_kernel(case, cuda), by_kernel(case, cuda)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_entries_that_nobody_writes_stay(cuda: torch.device) -> None:
    case = make_case([chain(80)] * 2, [80, 20], (1, 2), 4, 3, (128, 128), torch.bfloat16)
    found = by_kernel(case, cuda)
    for name in ("conv_state", "delta_state"):
        kept = [e for e in range(5) if e not in case.inputs["state_writes"].tolist()]
        assert torch.equal(found[f"{name}_out"][kept], case.inputs[name][kept])


def test_both_kernels_agree(cuda: torch.device) -> None:
    """The one without tensor cores, which tests choose by its settings."""
    case = make_case([chain(150)] * 2, [150, 40], (1, 2), 4, 3, (128, 128), torch.bfloat16)
    first, second = by_kernel(case, cuda), by_kernel(case, cuda, blocks_per_head=2)
    error, name = furthest(first, {n: x.double() for n, x in second.items()})
    assert 0 < error < 2 * TOLERANCE[torch.bfloat16], name


def _without_decay(case: Case) -> Case:
    """Of the second chunk's rows."""
    ba = case.inputs["ba"].clone()
    ba[CHUNK : 2 * CHUNK, ba.shape[1] // 2 :] = -100
    return changed(case, ba=ba)


def _window_of_the_rows_before(case: Case) -> Case:
    """The second sequence's convolution begins with the first one's last rows."""
    window = case.inputs["conv_state"].clone()
    (_, width, channels), rows = window.shape, len(case.parents[0])
    window[case.inputs["state_reads"][1]] = case.inputs["qkvz"][rows - width : rows, :channels]
    return changed(case, conv_state=window)


def _state_of_the_rows_before(case: Case) -> Case:
    """The second sequence goes on from the state after the first one."""
    state = case.inputs["delta_state"].clone()
    first = int(case.inputs["state_writes"][0])
    state[case.inputs["state_reads"][1]] = expected(case)["delta_state_out"][first].float()
    return changed(case, delta_state=state)


def _chunks_swapped(case: Case) -> Case:
    """The walk takes the second chunk before the first."""
    order = torch.arange(len(case.inputs["qkvz"]))
    order[: 2 * CHUNK] = order[: 2 * CHUNK].roll(CHUNK)
    return changed(case, qkvz=case.inputs["qkvz"][order], ba=case.inputs["ba"][order])


def _forgets_the_state(case: Case) -> Case:
    return changed(case, delta_state=torch.zeros_like(case.inputs["delta_state"]))


FAULTS: dict[str, Callable[[Case], Case]] = {
    "decay of a chunk forgotten": _without_decay,
    "window across a segment's boundary": _window_of_the_rows_before,
    "state across a segment's boundary": _state_of_the_rows_before,
    "chunks out of order": _chunks_swapped,
    "state before the prompt forgotten": _forgets_the_state,
    "a row too few stays": lambda c: changed(c, certain=c.inputs["certain"] - 1),
    "beta of the next head": lambda c: changed(c, ba=c.inputs["ba"].roll(1, dims=1)),
}
"""Each makes of a case one that a wrong implementation would compute instead."""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, cuda: torch.device) -> None:
    case = make_case([chain(150)] * 2, [150, 40], (1, 2), 4, 7, (64, 64), torch.bfloat16)
    error, _ = furthest(by_kernel(FAULTS[fault](case), cuda), expected(case))
    assert error > FAULT_FLOOR * TOLERANCE[torch.bfloat16]


def test_rows_behind_the_last_would_be_caught(cuda: torch.device) -> None:
    """What follows a chunk that is not full must not reach the state."""
    case = make_case([chain(100)], [100], (1, 2), 4, 7, (64, 64), torch.bfloat16)
    more = {n: torch.cat([case.inputs[n]] * 2)[:128] for n in ("qkvz", "ba")}
    full = {"certain": torch.tensor([128], dtype=torch.int32)}
    mask = torch.ones(1, 128, 128, dtype=torch.bool).tril()
    found = by_kernel(changed(case, **more, **full, tree_mask=mask), cuda)
    error = distance(found["delta_state_out"], expected(case)["delta_state_out"])
    assert error > FAULT_FLOOR * TOLERANCE[torch.bfloat16]


def test_captured_launches_follow_their_inputs(cuda: torch.device) -> None:
    """A replay reads the entries, counts and rows that stand in the buffers then."""
    first, second = (
        make_case([chain(90)] * 2, certain, (1, 2), 4, seed, (128, 128), torch.bfloat16)
        for seed, certain in ((1, [90, 2]), (2, [70, 90]))
    )
    check_captured(first, second, cuda)
