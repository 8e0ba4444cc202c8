"""Experts of engines that do not tell them, as TensorRT's: found out by what comes of them.

A torch session in float16 stands in for such an engine: it cannot be looked into, and takes the
other one of two experts whose router logits all but tie.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.gates import failed
from tests.parity.conftest import ask_few_options, without
from tests.parity.fault import gives
from tests.parity.planting import Tensors, plant_in
from tests.tiny import QUESTIONS, build_tiny_moe
from trt_eagle3.engine.backend import backend_named
from trt_eagle3.parity.checks.thresholds import THRESHOLDS
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.workload import Case
from trt_eagle3.parity.reference import route_search
from trt_eagle3.parity.reference.expected import ExpectedAnswer, input_embeds
from trt_eagle3.parity.reference.route_search import RouteSearch, tell_aux, tell_logits
from trt_eagle3.parity.reference.sources import read_sources
from trt_eagle3.parity.reference.target import TargetReference, add_visual_level
from trt_eagle3.parity.reference.target_rows import RouterSlack, run_layers
from trt_eagle3.parity.report.summary import Found
from trt_eagle3.parity.run import Validation
from trt_eagle3.prompts.prompt_file import read_questions

Routing = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
"""As ``graph.ops.fused_moe.routing``."""
OPS = importlib.import_module("trt_eagle3.graph.ops.fused_moe")
SOUND = OPS.routing
SOURCES = read_sources
OPEN = THRESHOLDS["layer_output"].values["float16"]
"""How near two router logits are that rounding may make change places."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = {"backend": "torch", "dtype": "float16"}
    return build_tiny_moe(tmp_path_factory.mktemp("mixture"), engine=engine)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sessions give no tensors inside their graphs."""
    monkeypatch.setattr(type(backend_named("torch")), "inspectable", False)


ALL = ("files", "batch", "sampling", "options")
THREE = ["target.aux", "draft.aux", "options.logprobs"]
"""What did not hold of the trained mixture on TensorRT 8.6."""


def validated(bundle: Path, num_cases: int, max_tokens: int, *stages: str) -> Found:
    """Every check but those of the optional ``stages``."""
    engine = RecordingEngine(bundle)
    questions = read_questions(QUESTIONS)[:num_cases]
    cases = [Case(str(i), "image", question) for i, question in enumerate(questions)]
    return Validation(engine, left_out=without(*stages)).run(cases, max_tokens, *SOURCES(engine))


def through(experts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """What ``routing`` gives of ``experts`` [n, k]."""
    weights = logits.float().softmax(dim=-1).gather(1, experts)
    return experts, weights / weights.sum(dim=-1, keepdim=True)


def turned(least: float, most: float) -> Routing:
    """The next expert in the place of the last, in rows where their logits are so far apart, over
    the root mean square of the row's.
    """

    def routing(logits: Tensor, top_k: int, _: int) -> tuple[Tensor, Tensor]:
        best = logits.float().topk(top_k + 1, dim=-1)
        sizes = logits.float().square().mean(dim=-1).sqrt()
        leads = (best.values[:, -2] - best.values[:, -1]) / sizes
        other = torch.cat([best.indices[:, : top_k - 1], best.indices[:, -1:]], dim=1)
        there = ((leads >= least) & (leads < most))[:, None]
        return through(torch.where(there, other, best.indices[:, :top_k]), logits)

    return routing


def few(routing: Routing) -> Routing:
    """``routing`` where few rows are verified together."""

    def chosen(logits: Tensor, top_k: int, renormalise: int) -> tuple[Tensor, Tensor]:
        return (routing if 1 < len(logits) < 8 else SOUND)(logits, top_k, renormalise)

    return chosen


def without_search(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Validation, "_route_search", lambda *_: None)


@pytest.mark.parametrize("searched", [False, True])
def test_engine_that_takes_the_other_of_two_tied_experts_is_sound_by_search_alone(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    ask_few_options(monkeypatch, ("seed",), 4)
    monkeypatch.setattr(OPS, "routing", turned(0.0, 0.005))
    if not searched:
        without_search(monkeypatch)
    found = validated(mixture, 3, 16, "files", "batch", "sampling")
    if not searched:
        assert set(failed(found)) >= set(THREE)
        return
    assert failed(found) == []
    worst = found.recorder["target.aux"].worst
    assert worst is not None
    assert worst.value < found.recorder["target.aux"].limit.value / 2


@pytest.mark.parametrize("searched", [False, True])
def test_verify_forwards_that_choose_otherwise_are_followed_on_their_own(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    monkeypatch.setattr(OPS, "routing", few(turned(0.0, 0.01)))
    if not searched:
        without_search(monkeypatch)
    found = validated(mixture, 1, 16, *ALL)
    assert failed(found) == ([] if searched else ["verify.logits", "draft.aux"])
    assert any(e.with_speculation for e in found.evidence.expected) == searched


def third_for_second(logits: Tensor, top_k: int, _: int) -> tuple[Tensor, Tensor]:
    best = logits.float().topk(top_k + 1, dim=-1).indices
    return through(torch.cat([best[:, : top_k - 1], best[:, -1:]], dim=1), logits)


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
    "the other expert where the two are too far apart to tie": turned(1.4 * OPEN, 2.8 * OPEN),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_the_router_is_none_that_a_choice_explains(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(OPS, "routing", FAULTS[fault])
    found = validated(mixture, 1, 8, *ALL)
    assert failed(found)[0] == "target.aux"
    assert "target.logits_l2" in failed(found)
    (expected,) = found.evidence.expected
    off = (expected.aux_errors[0].errors > OPEN).double().mean()
    assert (off > route_search.MOST_OFF) == (not expected.experts), "searched"


def test_expert_whose_output_is_a_tenth_too_large_is_caught(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = OPS.mixture

    def scaled(x: Tensor, logits: Tensor, weights_of: Any, **options: int) -> Tensor:
        gate_up, down = weights_of
        by_expert = (gate_up, lambda e: down(e) * (1.1 if e == 1 else 1.0))
        return sound(x, logits, by_expert, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(OPS, "mixture", scaled)
    assert failed(validated(mixture, 1, 8, *ALL))[0] == "target.aux"


def _aux_too_large(_: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, "aux_hidden_states": outputs["aux_hidden_states"] * 1.05}


def test_experts_that_pytorch_turns_by_rounding_loosen_no_tolerance(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 PyTorch takes other experts too: those rows differ by a tenth, others by 0.1 %."""
    planted = plant_in(mixture, tmp_path, monkeypatch)
    gives("target", _aux_too_large)(planted)
    monkeypatch.setattr(sys.modules[__name__], "RecordingEngine", lambda _: planted.engine())
    found = validated(planted.bundle, 3, 8, *ALL)
    assert failed(found) == ["target.aux", "draft.aux"]
    assert {m.case for m in found.recorder["target.aux"].failures} == {"0", "1", "2"}
    rounding = found.evidence.pytorch.rounding  # type: ignore[union-attr]
    errors = [x for own in rounding.answers.values() for x in own.outputs.values()]  # type: ignore[union-attr]
    assert float(torch.cat(errors).max()) < OPEN


def test_aux_layers_that_are_off_by_one_are_caught(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(engine: RecordingEngine) -> Any:
        spec, manifest = read_sources(engine)
        assert manifest is not None
        return spec, replace(manifest, aux_layers=tuple(k - 1 for k in manifest.aux_layers))

    monkeypatch.setattr(sys.modules[__name__], "SOURCES", shifted)
    assert failed(validated(mixture, 1, 8, *ALL)) == ["bundle.meaning", "target.aux", "draft.aux"]


@pytest.mark.parametrize(("precision", "kind"), [("float32", "moe"), ("float16", "dense")])
def test_float32_and_dense_targets_are_not_searched(
    mixture: Path, precision: str, kind: str
) -> None:
    engine = RecordingEngine(mixture)
    spec, _ = read_sources(engine)
    engine.close()
    if kind == "dense":
        spec = replace(spec, layers=(spec.layers[0],) * len(spec.layers))
    run: Any = SimpleNamespace(engine=SimpleNamespace(precision=precision), _router_slack=None)
    assert Validation._route_search(run, None, spec, None) is None  # type: ignore[arg-type]
    run.engine.precision = "float16"
    assert (Validation._route_search(run, None, spec, None) is None) == (kind == "dense")  # type: ignore[arg-type]


def test_row_told_of_by_its_logits_alone_is_searched_through_layers_with_aux_states(
    mixture: Path,
) -> None:
    """The last row of an answer is none of the draft's yet."""
    found = validated(mixture, 1, 8, *ALL).evidence
    (e,), reference, manifest = found.expected, found.reference, found.manifest
    assert manifest is not None
    lead, layer, row, turned_row = _nearest_tie(reference, e)
    engine = replace(e, experts={k: x.clone() for k, x in e.taken.items()}, taken={}, aux={})
    engine.experts[layer][row] = turned_row
    slack = RouterSlack(0.0, 1.01 * lead)
    run_layers(reference, [engine], manifest, lambda: None, slack)
    aux = torch.cat([e.aux[k][:row] for k in manifest.aux_layers], dim=-1)
    logits = engine.logits[[row - e.answer.prompt_len + 1]]
    told = [
        *tell_aux(manifest, reference.num_layers, aux, 1e-3),
        tell_logits(reference.num_layers, torch.tensor([row]), logits, 1e-3),
    ]
    (followed,) = RouteSearch(reference, manifest, slack).follow([e], [told])
    assert set(followed.experts[layer][row].tolist()) == set(turned_row.tolist())
    assert float(row_errors(followed.logits, engine.logits).max()) < 1e-5


def _nearest_tie(reference: TargetReference, e: ExpectedAnswer) -> tuple[float, int, int, Tensor]:
    """Of the answer's rows before the last aux layer: lead, layer, row, and the other experts."""
    hidden, rope = input_embeds(reference, e, e.vision), reference.rope(e.positions[:-1].T)
    found = []
    for layer in reference.layers():
        with layer.routed(None) as choices:
            hidden = layer(hidden, rope)
        hidden = add_visual_level(hidden, e.levels, layer.index, e.answer.visual_rows)
        for choice in choices if layer.index < 4 else []:
            leads = choice.leads[e.answer.prompt_len :]
            row = int(leads.argmin()) + e.answer.prompt_len
            found.append((float(leads.min()), layer.index, row, choice.other[row]))
    return min(found, key=lambda one: one[0])
