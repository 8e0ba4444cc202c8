"""Which shapes are captured, and which graphs stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trt_eagle3.engine.torch.cuda_graph import CapturedGraphs, shapes_of


def step(batch: int, tokens: int) -> Any:
    return shapes_of(
        {"inputs_embeds": torch.zeros(batch, tokens, 8), "past_lengths": torch.zeros(batch)}
    )


def test_shapes_are_due_when_they_come_the_third_time() -> None:
    graphs = CapturedGraphs()
    assert [graphs.due(step(1, 6)) for _ in range(3)] == [False, False, True]
    assert not graphs.due(step(2, 6))


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
