"""Summarise the results of a validation in a report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from trt_eagle3.engine.runtime.machine import machine_name
from trt_eagle3.parity import SUITES
from trt_eagle3.parity.checks.check_recorder import CheckRecorder, Measurement, Measurements
from trt_eagle3.parity.checks.diagnose import FailureDiagnosis, first_tensor
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import Mismatch
from trt_eagle3.parity.metrics import margins
from trt_eagle3.parity.record.answers import RecordedAnswer
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.report.result import (
    AcceptanceResult,
    CheckResult,
    DiagnosisResult,
    LayerError,
    MismatchResult,
    OverrideResult,
    PromptResult,
    QuantisationResult,
    Report,
    Subject,
)

__all__ = ["Findings", "summarise"]

_MAX_TEXT = 400
_FP8_KV = "FP8 KV caches"


@dataclasses.dataclass(frozen=True)
class Findings:
    """All results of a validation."""

    recorder: CheckRecorder
    evidence: Evidence
    diagnosis: FailureDiagnosis | None
    seconds: Mapping[str, float]


def summarise(
    found: Findings,
    *,
    suite: str,
    reference: str,
    mode: Literal["reference", "compare"] = "reference",
    other: RecordingEngine | None = None,
    left_out: Sequence[str] = (),
) -> Report:
    """Build the report."""
    checks = tuple(_check(m) for m in found.recorder.values())
    diagnosis = found.diagnosis
    return Report(
        mode=mode,
        passed=all(g.status != "failed" for g in checks),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=version("trt-eagle3"),
        bundle=_subject(found.evidence.engine),
        other=_subject(other) if other else None,
        reference=reference,
        suite=suite,
        checks=checks,
        diagnosis=DiagnosisResult(**dataclasses.asdict(diagnosis)) if diagnosis else None,
        mismatches=tuple(_mismatch(found.recorder, m) for m in found.recorder.mismatches),
        overrides=tuple(
            OverrideResult(**dataclasses.asdict(o)) for o in found.recorder.thresholds.overrides
        ),
        prompts=tuple(_prompt(found, answer) for answer in found.evidence.answers),
        left_out=tuple(left_out),
        layers=_layers(found.recorder),
        acceptance=_acceptance(found, suite),
        quantisation=_quantisation(found.evidence),
        margins=_margins(found),
        seconds=found.seconds,
        peak_memory=peak_memory(),
    )


def _subject(engine: RecordingEngine) -> Subject:
    record = engine.record
    draft = record.sources.get("draft")
    return Subject(
        path=str(engine.path),
        name=record.config.name,
        backend=record.engine.backend,
        device=record.config.engine.device,
        machine=machine_name(record.config.engine.device),
        dtype=record.engine.dtype,
        tool_version=record.tool_version,
        created_at=record.created_at,
        target=record.sources["target"].checkpoint,
        draft=draft.checkpoint if draft else None,
        max_seq_len=record.config.limits.max_seq_len,
        draft_overrides={k: json.dumps(v) for k, v in record.config.draft.overrides.items()}
        if record.config.draft
        else {},
    )


def _check(m: Measurements) -> CheckResult:
    failures, worst = m.failures, m.worst
    shown = failures[0] if failures else worst
    tolerance = m.limit.value if shown is None or shown.bound is None else shown.bound
    return CheckResult(
        name=m.check.name,
        stage=m.check.stage,
        title=m.check.title,
        status=m.status,
        metric=m.limit.metric,
        comparison="<=" if m.limit.better == "low" else ">=",
        tolerance=tolerance,
        threshold=m.limit.name,
        overridden=m.limit.overridden,
        origin=m.limit.origin,
        measured=None if worst is None else worst.value,
        used=dataclasses.replace(m.limit, value=tolerance).used(worst.value) if worst else None,
        count=len(m.taken),
        compared=m.compared,
        failed=len(failures),
        case=shown.case if shown else "",
        tensor=shown.tensor if shown else "",
        row=shown.row if shown else None,
        detail=_detail(m, shown, failed=bool(failures)),
        reason=m.reason,
    )


def _detail(m: Measurements, shown: Measurement | None, *, failed: bool) -> str:
    """Return the detail of a failure or of a bound of its own, else the counts over all prompts."""
    if shown is None:
        return ""
    if shown.bound is not None:
        return shown.detail
    counted = ", ".join(f"{n} {what}" for what, n in m.counts.items() if n)
    return counted if m.counts and not failed else shown.detail


def _mismatch(recorder: CheckRecorder, m: Mismatch) -> MismatchResult:
    first = first_tensor(recorder, m.case) if m.kind == "failure" else None
    return MismatchResult(**dataclasses.asdict(m), first_tensor=first)


def _prompt(found: Findings, answer: RecordedAnswer) -> PromptResult:
    failed = [
        name
        for name, measured in found.recorder.items()
        if any(m.case == answer.name for m in measured.failures)
    ]
    return PromptResult(
        name=answer.name,
        kind=answer.case.kind,
        prompt=_short(answer.case.question.prompt),
        prompt_tokens=answer.prompt_len,
        visual_tokens=int(answer.inputs.visual_rows.sum()),
        answer_tokens=len(answer.autoregressive),
        answer=_short(found.evidence.decode(answer.autoregressive[: answer.served_len])),
        failed_checks=tuple(failed),
    )


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 60]} [...] {text[-50:]}"


def _layers(recorder: CheckRecorder) -> tuple[LayerError, ...]:
    """Return the worst prompt's error of each layer.

    A step is the decoder layer's, or the addition of its deepstack level.
    """
    worst: dict[int, dict[str, float]] = {}
    for check in ("target.layers", "target.layer_steps"):
        for m in recorder[check].taken:
            values = worst.setdefault(int(m.tensor.split(".")[1]), {})
            values[check] = max(m.value, values.get(check, 0.0))
    return tuple(
        LayerError(
            layer=k, output=worst[k].get("target.layers"), step=worst[k].get("target.layer_steps")
        )
        for k in sorted(worst)
    )


def _acceptance(found: Findings, suite: str) -> AcceptanceResult | None:
    counts = found.evidence.acceptance.served
    if not counts.reached:
        return None
    own = any(answer.case.own for answer in found.evidence.answers)
    return AcceptanceResult(
        prompts=("bundle" if suite in SUITES else "file") if own else "generic",
        cycles=tuple(counts.reached),
        engine=tuple(e / n for e, n in zip(counts.engine, counts.reached, strict=True)),
        reference=tuple(r / n for r, n in zip(counts.reference, counts.reached, strict=True)),
        lengths=dict(sorted(counts.lengths.items())),
    )


def _quantisation(e: Evidence) -> QuantisationResult | None:
    if e.cost is None or e.original is None:
        return None
    quantisation = e.checkpoint.quantisation if e.original is not e.spec else None
    caches = len(e.engine.record.kv_scales)
    return QuantisationResult(
        weights={
            **(quantisation.weights if quantisation else {}),
            **({_FP8_KV: caches} if caches else {}),
        },
        provenance=quantisation.provenance if quantisation else "engine.kv_dtype",
        original=str(e.original.path),
        **dataclasses.asdict(e.cost),
    )


def _margins(found: Findings) -> tuple[tuple[float, Literal["same", "tie", "failure"]], ...]:
    differ = found.recorder["tokens.plain"].mismatches
    kinds = {(m.case, m.step): m.kind for m in differ}
    shown: list[tuple[float, Literal["same", "tie", "failure"]]] = []
    for e in found.evidence.expected:
        for step, margin in enumerate(margins(e.logits).tolist()):
            shown.append((margin, kinds.get((e.answer.name, step), "same")))
    return tuple(shown)


def peak_memory() -> int | None:
    """Return peak resident bytes of this process (VmHWM); None if the system lacks it."""
    try:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
