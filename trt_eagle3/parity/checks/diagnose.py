"""Diagnose a failure: find the first tensor outside its tolerance.

First the coarse tensor, then the tensors inside that stage. Every tensor is compared with what the
reference computes from the engine's own input to that stage, so the first tensor outside its
tolerance locates the fault.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trt_eagle3.parity.checks.check_recorder import CheckRecorder, Measurement
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.metrics import errors_or_infinite
from trt_eagle3.parity.record.engine import ROUTER, RecordedForward, replay
from trt_eagle3.parity.record.intermediates import tensor_names
from trt_eagle3.parity.record.trace import embeds_of, outputs_of
from trt_eagle3.parity.reference.draft_parity import Errors
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.routing import Routes

__all__ = ["FailureDiagnosis", "diagnose", "diagnose_coarsely", "first_tensor"]

_LAYER = re.compile(r"layers\.(\d+)\.output(_pre_deepstack)?")
_VISION_BLOCK = (
    "norm1",
    "attn.qkv",
    "attn.output",
    "attention_residual",
    "norm2",
    *("mlp.fc1", "mlp.fc2"),
    *("mlp.inner", "mlp.output"),
    "output",
)


@dataclass(frozen=True)
class FailureDiagnosis:
    """The first failure.

    Attributes:
        stage, check, case, row: location of the failure.
        tensor: the first tensor outside its tolerance, as fine as it could be found.
        value: the measured error.
        bound: its tolerance.
        detail: an explanation for the report.
    """

    stage: str
    check: str
    case: str
    tensor: str
    row: int | None
    value: float
    bound: float
    detail: str


def diagnose(recorder: CheckRecorder, evidence: Evidence) -> FailureDiagnosis | None:
    """Return the first failure, refined if its stage has tensors inside."""
    found = recorder.first_failure()
    if found is None:
        return None
    closer = _look_closer(recorder, found, evidence) or _strayed(recorder, found, evidence)
    return closer or diagnose_coarsely(recorder)


def diagnose_coarsely(recorder: CheckRecorder) -> FailureDiagnosis | None:
    """Return the first failure as it was measured."""
    m = recorder.first_failure()
    if m is None:
        return None
    found = recorder[m.check]
    stage, bound = found.check.stage, found.limit.value
    return FailureDiagnosis(stage, m.check, m.case, m.tensor, m.row, m.value, bound, m.detail)


def first_tensor(recorder: CheckRecorder, case: str) -> str | None:
    """Return the first tensor of one case outside its tolerance, ignoring ``tokens.`` checks.

    None if every tensor is within its tolerance.
    """
    failures = (
        m
        for name, found in recorder.items()
        if not name.startswith("tokens.")
        for m in found.failures
    )
    return next((m.tensor for m in failures if m.case == case), None)


def _look_closer(
    recorder: CheckRecorder, m: Measurement, evidence: Evidence
) -> FailureDiagnosis | None:
    """Return the first tensor inside the stage that is outside its tolerance, if any."""
    inside = _inside(m, evidence, recorder.thresholds["layer_step"].value)
    stage = recorder[m.check].check.stage
    limit = recorder.thresholds["vision" if stage == "vision" else "layer_step"]
    for name, errors in inside:
        worst = float(errors.max())
        if not limit.holds(worst):
            detail = f"the first of the tensors inside; seen at {m.tensor} ({m.value:.3g})"
            row = int(errors.argmax())
            return FailureDiagnosis(stage, m.check, m.case, name, row, worst, limit.value, detail)
    return None


def _strayed(
    recorder: CheckRecorder, m: Measurement, evidence: Evidence
) -> FailureDiagnosis | None:
    """Return the first layer whose experts differ from the reference's without a tie."""
    expected = next((e for e in evidence.expected if e.answer.name == m.case), None)
    if expected is None or not m.check.startswith("target."):
        return None
    bound = recorder.thresholds["layer_output"].value
    for k, behind in sorted(expected.strays.items()):
        if not float(behind.max()) <= bound:
            row, name = int(behind.argmax()), f"layers.{k}.{ROUTER}"
            detail = "the first layer whose experts differ from the reference's although router "
            detail += f"logits do not tie; seen at {m.tensor} ({m.value:.3g})"
            stage, value = recorder[m.check].check.stage, float(behind[row])
            return FailureDiagnosis(stage, m.check, m.case, name, row, value, bound, detail)
    return None


def _inside(m: Measurement, evidence: Evidence, slack: float) -> Errors:
    """Yield errors of the tensors inside the stage of a failure; none if it has no such tensors.

    ``slack``: allowed error of router logits.
    """
    at = next((i for i, e in enumerate(evidence.expected) if e.answer.name == m.case), None)
    if at is None:
        return iter(())
    expected = evidence.expected[at]
    if m.check in {"vision.embeds", "vision.deepstack"}:
        return _inside_vision(expected, evidence)
    if m.check in {"draft.features", "draft.logits"} and evidence.drafting is not None:
        return evidence.drafting.inside(evidence.record, expected)
    return _inside_target(m, expected, evidence, slack)


def _inside_target(
    m: Measurement, expected: ExpectedAnswer, evidence: Evidence, slack: float
) -> Errors:
    """Yield errors inside a decoder layer; none if only adding deepstack can be wrong."""
    layer = _LAYER.fullmatch(m.tensor)
    if m.check not in {"target.layer_steps", "target.layers"} or not layer:
        return iter(())
    if evidence.engine.bundle.tensor_parallel > 1:  # they are those of one rank's heads
        return iter(())
    on_top = not layer[2] and f"{m.tensor}_pre_deepstack" in expected.intermediates
    return iter(()) if on_top else _inside_layer(expected, int(layer[1]), evidence, slack)


def _replayed(
    evidence: Evidence, graph: str, names: Sequence[str], forwards: Sequence[RecordedForward]
) -> list[dict[str, Tensor]]:
    bound = evidence.record.bound.get(graph, {})
    return replay(evidence.engine.open_graph(graph, names), forwards, bound)


def _inside_layer(e: ExpectedAnswer, k: int, evidence: Evidence, slack: float) -> Errors:
    """Yield errors of the tensors of decoder layer ``k``, from the engine's own input to it."""
    forwards, reference = e.answer.autoregressive_forwards, evidence.reference
    given = e.intermediates[f"layers.{k - 1}.output"] if k else embeds_of(forwards)
    (layer,) = reference.layers([k])
    rope = reference.rope(e.positions[:-1].T)
    with layer.routed(Routes(e.experts[k], slack) if k in e.experts else None):
        expected = layer.trace(given.to(reference.device, reference.dtype), rope)
    pre = f"layers.{k}.output_pre_deepstack"
    known = tensor_names(evidence.engine, "target")
    if pre in known:
        expected[pre] = expected.pop(f"layers.{k}.output")
    names = [name for name in expected if name in known]
    outputs = _replayed(evidence, "target", names, forwards)
    for name in names:
        yield name, errors_or_infinite(outputs_of(forwards, outputs, name), expected[name])


def _inside_vision(e: ExpectedAnswer, evidence: Evidence) -> Errors:
    """Yield errors of the tower's tensors, in order, each against the reference's own."""
    seen = e.answer.vision
    if seen is None:
        return
    names = _vision_names(evidence)
    (found,) = _replayed(evidence, "vision", names, [seen])
    expected = evidence.reference.vision(seen.inputs["patches"], e.answer.inputs.grid_thw, names)
    for name in names:
        ours, theirs = found[name].flatten(1), expected.intermediates[name].flatten(1)
        yield name, errors_or_infinite(ours, theirs)
    yield "visual_embeds", errors_or_infinite(found["visual_embeds"], expected.visual_embeds)
    for i, level in enumerate(expected.visual_levels):
        ours = found["deepstack"][i] if "deepstack" in found else level * 0
        yield f"level.{i}", errors_or_infinite(ours, level)


def _vision_names(evidence: Evidence) -> list[str]:
    """Return the tensors that the vision graph can return, in order of computation."""
    vision = evidence.engine.spec.require_vision()
    blocks = [f"blocks.{i}.{name}" for i in range(vision.depth) for name in _VISION_BLOCK]
    known = tensor_names(evidence.engine, "vision")
    return [name for name in ("patch_embed", "embeddings", *blocks) if name in known]
