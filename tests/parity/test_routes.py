"""Experts of a mixture, read from the engine's router logits in every recorded forward.

A torch session in float16 stands in for engines of which nothing else inside can be looked at, as
TensorRT's. It takes the other one of two experts whose router logits all but tie.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.gates import failed
from tests.parity.conftest import ask_few_options, without
from tests.parity.fault import gives
from tests.parity.planting import Planted, Tensors, plant_in
from tests.tiny import QUESTIONS, build_tiny, build_tiny_moe
from trt_eagle3.engine.runtime.backend import backend_named
from trt_eagle3.parity import run
from trt_eagle3.parity.checks.thresholds import THRESHOLDS
from trt_eagle3.parity.record.engine import ROUTER, RecordingEngine
from trt_eagle3.parity.record.workload import Case
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.report.summary import Findings
from trt_eagle3.parity.run import Validation
from trt_eagle3.prompts.prompt_file import read_questions

Routing = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""As ``graph.ops.fused_moe.routing``."""
Turn = Callable[[Tensor], Tensor]
"""What becomes of router logits [n, E]."""
OPS = importlib.import_module("trt_eagle3.graph.ops.fused_moe")
SOUND = OPS.routing
TOP_K = 2
OPEN = THRESHOLDS["layer_output"].values["float16"]
"""How near two router logits are that rounding may make change places."""
ALL = ("files", "batch", "sampling", "options")
THREE = ["target.aux", "draft.aux", "options.logprobs"]
"""What does not hold of such an engine where its experts are not followed."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "float16"}
    return build_tiny_moe(tmp_path_factory.mktemp("mixture"), engine=engine)


def give_inside(patch: pytest.MonkeyPatch, wanted: Callable[[str], bool]) -> None:
    """Of the tensors inside graphs torch sessions give those that are ``wanted``."""
    backend = type(backend_named("torch"))
    every = backend.intermediates
    patch.setattr(
        backend,
        "intermediates",
        lambda self, folder: frozenset(filter(wanted, every(self, folder))),
    )


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sessions give router logits, and nothing else inside their graphs."""
    give_inside(monkeypatch, lambda name: name.endswith(ROUTER))


@pytest.fixture
def planted(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return plant_in(mixture, tmp_path, monkeypatch)


def validated(planted: Planted, num_cases: int, max_tokens: int, *stages: str) -> Findings:
    """Every check but those of the optional ``stages``."""
    engine = planted.engine()
    questions = read_questions(QUESTIONS)[:num_cases]
    cases = [Case(str(i), "image", question) for i, question in enumerate(questions)]
    return Validation(engine, left_out=without(*stages)).run(
        cases, max_tokens, *read_sources(engine)
    )


def turned(least: float, most: float) -> Turn:
    """The logits of the last expert and of the next one change places, in rows where they are so
    far apart, over the root mean square of the row's.
    """

    def turn(logits: Tensor) -> Tensor:
        best = logits.float().topk(TOP_K + 1, dim=-1)
        sizes = logits.float().square().mean(dim=-1).sqrt()
        leads = (best.values[:, -2] - best.values[:, -1]) / sizes
        there = ((leads >= least) & (leads < most))[:, None]
        last, following = best.indices[:, -2:-1], best.indices[:, -1:]
        swapped = logits.scatter(1, last, logits.gather(1, following))
        swapped = swapped.scatter(1, following, logits.gather(1, last))
        return torch.where(there, swapped, logits)

    return turn


def few(turn: Turn) -> Turn:
    """``turn`` where few rows are verified together."""
    return lambda logits: turn(logits) if 1 < len(logits) < 8 else logits


def plant(planted: Planted, turn: Turn) -> None:
    """The engine's routers give what ``turn`` makes of their logits, and it goes by that."""

    def gave(_: Tensors, outputs: Tensors) -> Tensors:
        return {name: turn(x) if name.endswith(ROUTER) else x for name, x in outputs.items()}

    def routing(logits: Tensor, top_k: int, renormalise: int) -> tuple[Tensor, Tensor]:
        return SOUND(turn(logits), top_k, renormalise)  # type: ignore[no-any-return]

    gives("target", gave)(planted)
    planted.patch.setattr(OPS, "routing", routing)


@pytest.mark.parametrize("told", [False, True])
def test_engine_that_takes_the_other_of_two_tied_experts_is_sound_where_it_tells_them(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    ask_few_options(monkeypatch, ("seed",), 4)
    plant(planted, turned(0.0, 0.005))
    if not told:
        give_inside(monkeypatch, lambda _: False)
    found = validated(planted, 3 if told else 2, 16, "files", "batch", "sampling")
    if not told:
        assert set(failed(found)) >= set(THREE)
        return
    assert failed(found) == []
    worst = found.recorder["target.aux"].worst
    assert worst is not None
    assert worst.value < found.recorder["target.aux"].limit.value / 2


@pytest.mark.parametrize("followed", [False, True])
def test_verify_forwards_that_choose_otherwise_are_followed_on_their_own(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    plant(planted, few(turned(0.0, 0.01)))
    if not followed:
        monkeypatch.setattr(run, "with_speculation", lambda *_: None)
    found = validated(planted, 1, 16, *ALL)
    assert failed(found) == ([] if followed else ["verify.logits", "draft.aux"])
    assert any(e.with_speculation for e in found.evidence.expected) == followed


def test_experts_beyond_a_tie_are_a_fault_that_names_the_first_layer(planted: Planted) -> None:
    plant(planted, turned(1.4 * OPEN, 2.8 * OPEN))
    found = validated(planted, 1, 8, *ALL)
    assert failed(found)[0] == "target.aux"
    assert "target.logits_l2" in failed(found)
    (expected,) = found.evidence.expected
    first = min(k for k, behind in expected.strays.items() if float(behind.max()) > OPEN)
    assert found.diagnosis is not None
    assert found.diagnosis.tensor == f"layers.{first}.{ROUTER}"
    assert OPEN < found.diagnosis.value < 3 * OPEN
    assert "do not tie" in found.diagnosis.detail


def third_for_second(logits: Tensor, top_k: int, _: int) -> tuple[Tensor, Tensor]:
    best = logits.float().topk(top_k + 1, dim=-1).indices
    experts = torch.cat([best[:, : top_k - 1], best[:, -1:]], dim=1)
    weights = logits.float().softmax(dim=-1).gather(1, experts)
    return experts, weights / weights.sum(dim=-1, keepdim=True)


def in_reverse(logits: Tensor, top_k: int, renormalise: int) -> tuple[Tensor, Tensor]:
    """Each expert counts as much as another one should."""
    experts, weights = SOUND(logits, top_k, renormalise)
    return experts.flip(1), weights


def not_renormalised(logits: Tensor, top_k: int, _: int) -> tuple[Tensor, Tensor]:
    return SOUND(logits, top_k, 0)  # type: ignore[no-any-return]


FAULTS: dict[str, Routing] = {
    "the third best expert for the second": third_for_second,
    "experts in the wrong order": in_reverse,
    "weights of experts that do not sum to one": not_renormalised,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_experts_that_are_not_those_of_the_logits_are_a_fault(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(OPS, "routing", FAULTS[fault])
    found = validated(planted, 1, 8, *ALL)
    assert failed(found)[0] == "target.aux"
    assert "target.logits_l2" in failed(found)


def test_expert_whose_output_is_a_tenth_too_large_is_caught(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = OPS.mixture

    def scaled(x: Tensor, logits: Tensor, weights_of: Any, **options: int) -> Tensor:
        gate_up, down = weights_of
        by_expert = (gate_up, lambda e: down(e) * (1.1 if e == 1 else 1.0))
        return sound(x, logits, by_expert, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(OPS, "mixture", scaled)
    assert failed(validated(planted, 1, 8, *ALL))[0] == "target.aux"


def _aux_too_large(_: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, "aux_hidden_states": outputs["aux_hidden_states"] * 1.05}


def test_experts_that_pytorch_turns_by_rounding_loosen_no_tolerance(planted: Planted) -> None:
    """In float16 PyTorch takes other experts too: those rows differ by a tenth, others by 0.1 %."""
    gives("target", _aux_too_large)(planted)
    found = validated(planted, 3, 8, *ALL)
    assert failed(found) == ["target.aux", "draft.aux"]
    assert {m.case for m in found.recorder["target.aux"].failures} == {"0", "1", "2"}
    rounding = found.evidence.pytorch.rounding  # type: ignore[union-attr]
    errors = [x for own in rounding.answers.values() for x in own.outputs.values()]  # type: ignore[union-attr]
    assert float(torch.cat(errors).max()) < OPEN


def test_aux_layers_that_are_off_by_one_are_caught_and_no_router_is_blamed(
    mixture: Path,
) -> None:
    engine = RecordingEngine(mixture)
    spec, manifest = read_sources(engine)
    assert manifest is not None
    shifted = replace(manifest, aux_layers=tuple(k - 1 for k in manifest.aux_layers))
    cases = [Case("0", "image", read_questions(QUESTIONS)[0])]
    found = Validation(engine, left_out=without(*ALL)).run(cases, 8, spec, shifted)
    assert failed(found) == ["bundle.meaning", "target.aux", "draft.aux"]
    (expected,) = found.evidence.expected
    assert max(float(behind.max()) for behind in expected.strays.values()) <= OPEN


def test_target_without_a_mixture_is_asked_for_no_router(tmp_path: Path) -> None:
    engine = RecordingEngine(build_tiny(tmp_path, engine={"backend": "torch"}))
    engine.generate("1 + 1?", max_tokens=2)
    forwards = [f for f in engine.take() if f.graph == "target"]
    engine.close()
    assert forwards
    assert not any(ROUTER in name for f in forwards for name in f.outputs)
