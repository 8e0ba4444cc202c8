"""Which shapes are captured, and which graphs stay."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from trt_eagle3.decode.policy.candidate import candidate_sizes
from trt_eagle3.engine.runtime.buckets import PATCHES, PROMPT_WIDTHS, batch_sizes
from trt_eagle3.engine.torch.capture import whole
from trt_eagle3.engine.torch.capture.whole import Captured, CapturedGraphs, shapes_of


def step(batch: int, tokens: int) -> Any:
    return shapes_of(
        {"inputs_embeds": torch.zeros(batch, tokens, 8), "past_lengths": torch.zeros(batch)}
    )


def test_shapes_are_due_when_they_come_the_third_time() -> None:
    graphs = CapturedGraphs()
    assert [graphs.due(step(1, 6)) for _ in range(3)] == [False, False, True]
    assert not graphs.due(step(2, 6))


def test_shapes_that_come_now_and_then_are_never_due() -> None:
    """As lengths of prompts do: each comes again, some day."""
    graphs = CapturedGraphs()
    for _ in range(5):
        assert not any(graphs.due(step(1, tokens)) for tokens in range(1, 65))
    assert len(graphs._runs) <= 64
    assert [graphs.due(step(4, 4)) for _ in range(3)] == [False, False, True]
    assert graphs.due(step(4, 4))


def test_graphs_of_every_width_that_a_server_prepares_stay() -> None:
    """Chains of 5 up to 128 sequences, and short prompts; images of every size."""
    for prepared in (
        [step(b, n) for n in candidate_sizes(6) for b in batch_sizes(128)]
        + [step(1, width) for width in PROMPT_WIDTHS],
        [shapes_of({"patches": torch.zeros(n, 4)}) for n in PATCHES.sizes(2048)],
    ):
        graphs = CapturedGraphs()
        made: Any = SimpleNamespace()
        for shapes in prepared:
            graphs.add(shapes, made)
        assert all(graphs.get(shapes) is made for shapes in prepared)


def test_long_prompts_are_never_due() -> None:
    graphs = CapturedGraphs()
    assert not any(graphs.due(step(1, 257)) for _ in range(5))
    assert [graphs.due(step(8, 32)) for _ in range(3)] == [False, False, True]


def test_steps_of_a_crowd_are_due_up_to_1024_rows() -> None:
    graphs = CapturedGraphs()
    assert [graphs.due(step(128, 8)) for _ in range(3)] == [False, False, True]
    assert not any(graphs.due(step(128, 9)) for _ in range(5))


def test_graph_that_was_not_used_for_the_longest_time_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
    graphs = CapturedGraphs(most=2)
    made: list[Any] = [SimpleNamespace(name=i) for i in range(3)]
    graphs.add(step(1, 1), made[0])
    graphs.add(step(1, 2), made[1])
    assert graphs.get(step(1, 1)) is made[0]
    assert graphs.add(step(1, 3), made[2]) is made[2]
    assert [graphs.get(step(1, n)) for n in (1, 2, 3)] == [made[0], None, made[2]]
    assert waits == [1]
    graphs.clear()
    assert graphs.get(step(1, 1)) is None


def test_graphs_of_many_rows_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    graphs = CapturedGraphs(most_rows=3000)
    images = [shapes_of({"patches": torch.zeros(n, 4)}) for n in (1024, 1152, 1280)]
    made: list[Any] = [SimpleNamespace(name=i) for i in range(3)]
    for shapes, captured in zip(images, made, strict=True):
        graphs.add(shapes, captured)
    assert [graphs.get(shapes) for shapes in images] == [None, made[1], made[2]]


def test_images_of_many_patches_are_never_due() -> None:
    graphs = CapturedGraphs()
    small, large = (shapes_of({"patches": torch.zeros(n, 4)}) for n in (2048, 2304))
    assert [graphs.due(small) for _ in range(3)] == [False, False, True]
    assert not any(graphs.due(large) for _ in range(5))


def test_input_whose_copy_failed_is_copied_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory ran out, say."""
    mask, static = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64)
    captured = Captured(None, {"mask": static}, {})  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(whole, "to_device", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            captured.fill({"mask": mask})
    captured.fill({"mask": mask})
    assert static.tolist() == [3, 4]


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (4, 128, 128), (70000,)])
def test_inputs_are_compared_whole(shape: tuple[int, ...]) -> None:
    one = torch.randint(9, shape)
    assert whole._are_equal(one, one.clone())
    assert not whole._are_equal(one, torch.zeros(7))
    for place in {0, one.numel() // 2, one.numel() - 1} if one.numel() else ():
        other = one.clone()
        other.view(-1)[place] += 1
        assert not whole._are_equal(one, other)


def test_large_inputs_are_compared_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wakes others from 32,768 elements on."""
    equal = Mock(side_effect=torch.equal)
    monkeypatch.setattr(torch, "equal", equal)
    mask = torch.ones(128, 128, dtype=torch.bool).expand(4, -1, -1)
    assert whole._are_equal(mask, mask.clone())
    assert 0 < max(call.args[0].numel() for call in equal.call_args_list) < 32768


@pytest.mark.gpu
def test_inputs_from_the_host_do_not_wait_for_the_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows = torch.arange(1 << 20)
    static = {"rows": torch.zeros_like(rows, device="cuda")}
    captured = Captured(torch.cuda.CUDAGraph(), static, {})
    captured.fill({"rows": rows})  # the first page-locked memory takes longer
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # of the device's clock: half a second and more
    start = time.perf_counter()
    captured.fill({"rows": rows + 1})
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    assert time.perf_counter() - start > 0.3
    assert seconds < 0.1
    assert torch.equal(static["rows"].cpu(), rows + 1)
