"""Experts that all but tie: the reference takes the engine's, and no others."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.families.gates import failed, validate_pair
from tests.tiny import build_tiny_moe
from trt_eagle3.graph.ops.fused_moe import routing
from trt_eagle3.parity.record.routes import chosen_experts
from trt_eagle3.parity.reference.routing import RouterChoice, Routes, routed
from trt_eagle3.prompts.prompt_file import Question

LOGITS = torch.tensor([[4.0, 2.01, 2.0, -3.0], [4.0, 3.0, 1.0, -3.0]])
"""Of two experts the second and third all but tie in the first row."""


class Router(nn.Module):
    """Gives what transformers' routers give."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts = logits.softmax(dim=-1).topk(2, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), experts


def through(engine: list[list[int]], slack: float) -> tuple[Tensor, Tensor, RouterChoice]:
    """Weights and experts of ``LOGITS`` where the engine chose ``engine``, and the router's
    choice.
    """
    mlp: Any = SimpleNamespace(gate=Router())
    with routed(mlp, Routes(torch.tensor(engine), slack)) as choices:
        _, weights, experts = mlp.gate(LOGITS)
    assert not mlp.gate._forward_hooks
    (choice,) = choices
    assert torch.equal(choice.taken, experts)
    return weights, experts, choice


def test_engines_experts_are_taken_where_they_tie_with_the_references_own_weights() -> None:
    weights, experts, _ = through([[0, 2], [0, 1]], 0.01)
    assert experts.tolist() == [[0, 2], [0, 1]]
    probs = LOGITS[0].softmax(dim=-1)[[0, 2]]
    assert torch.allclose(weights[0], probs / probs.sum())


@pytest.mark.parametrize(
    ("engine", "slack", "row"), [([[0, 2], [0, 2]], 0.01, 1), ([[0, 3], [0, 1]], 0.07, 0)]
)
def test_experts_that_do_not_tie_are_the_references_own(
    engine: list[list[int]], slack: float, row: int
) -> None:
    _, experts, _ = through(engine, slack)
    assert experts[row].tolist() == [0, 1]


def test_float32_leaves_no_such_tie_open() -> None:
    _, experts, choice = through([[0, 2], [0, 1]], 2e-5)
    assert experts.tolist() == [[0, 1], [0, 1]]
    size = float(LOGITS[0].square().mean().sqrt())
    assert float(choice.leads[0]) == pytest.approx(0.01 / size, rel=1e-4)


def test_experts_are_behind_by_the_logits_that_change_places() -> None:
    _, _, choice = through([[0, 2], [2, 3]], 0.01)
    sizes = LOGITS.square().mean(dim=-1).sqrt()
    expected = [0.01, 4.0 - -3.0]  # of the second row 0 and 1 are lost, 2 and 3 came
    assert choice.behind.tolist() == pytest.approx(
        [x / float(s) for x, s in zip(expected, sizes, strict=True)], rel=1e-4
    )
    _, _, same = through([[1, 0], [0, 1]], 0.01)
    assert same.behind.tolist() == [0.0, 0.0]


def test_router_that_takes_every_expert_leaves_nothing_open() -> None:
    mlp: Any = SimpleNamespace(gate=Router())
    with routed(mlp, None) as choices:
        mlp.gate(LOGITS[:, :2])
    assert choices[0].leads.isinf().all()


def test_of_equal_logits_the_first_expert_is_chosen_by_op_and_reading_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 5, (200, 32), generator=generator).bfloat16()
    expected = [sorted(range(32), key=lambda e: (-row[e], e))[:4] for row in logits.tolist()]
    assert routing(logits, 4, 1)[0].tolist() == expected
    assert chosen_experts(logits, 4).tolist() == expected


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "bfloat16"}
    return build_tiny_moe(tmp_path_factory.mktemp("mixture"), engine=engine)


ASKED = [Question("Why is the sky blue, and what is the sea made of? Count to ten, then back.")]


def test_bfloat16_mixture_whose_experts_tie_is_sound(mixture: Path) -> None:
    found = validate_pair(mixture, ASKED)
    assert failed(found) == []
    (expected,) = found.evidence.expected
    assert 0 < int(expected.open_rows.sum()) < len(expected.open_rows)


def test_wrong_expert_where_none_tie_is_a_fault(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes the third best expert for the second, in every row."""
    module = importlib.import_module("trt_eagle3.graph.ops.fused_moe")

    def routing(router_logits: Tensor, top_k: int, renormalise: int) -> tuple[Tensor, Tensor]:
        weights, experts = torch.softmax(router_logits.float(), dim=-1).topk(top_k + 1)
        kept = [*range(top_k - 1), top_k]
        weights, experts = weights[:, kept], experts[:, kept]
        return experts, weights / weights.sum(-1, keepdim=True) if renormalise else weights

    monkeypatch.setattr(module, "routing", routing)
    found = validate_pair(mixture, ASKED)
    assert failed(found)[0] == "target.layer_steps"
    assert found.diagnosis is not None
    assert found.diagnosis.tensor == "layers.1.mlp.output"
