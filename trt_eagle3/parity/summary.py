"""From what was measured to the report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from trt_eagle3.parity.answers import Answer
from trt_eagle3.parity.board import GATES, Board, Measurement
from trt_eagle3.parity.drafting import Acceptance
from trt_eagle3.parity.locate import Diagnosis, first_tensor
from trt_eagle3.parity.metrics import margins
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.result import (
    AcceptanceResult,
    DiagnosisResult,
    GateResult,
    LayerError,
    MismatchResult,
    OverrideResult,
    PromptResult,
    Report,
    Subject,
)
from trt_eagle3.parity.target_check import CheckedTarget
from trt_eagle3.parity.token_check import Mismatch

__all__ = ["Found", "summarise"]

_MAX_TEXT = 400


@dataclasses.dataclass(frozen=True)
class Found:
    """All that a validation found. ``targets`` in the order of the cases."""

    board: Board
    engine: RecordingEngine
    targets: Sequence[CheckedTarget]
    mismatches: Sequence[Mismatch]
    acceptance: Acceptance
    diagnosis: Diagnosis | None
    seconds: Mapping[str, float]


def summarise(
    found: Found,
    *,
    suite: str,
    reference: str,
    mode: Literal["reference", "compare"] = "reference",
    other: RecordingEngine | None = None,
    left_out: Sequence[str] = (),
) -> Report:
    """The report."""
    gates = tuple(_gate(found.board, name) for name in GATES)
    diagnosis = found.diagnosis
    return Report(
        mode=mode,
        passed=all(g.status != "failed" for g in gates),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=version("trt-eagle3"),
        bundle=_subject(found.engine),
        other=_subject(other) if other else None,
        reference=reference,
        suite=suite,
        gates=gates,
        diagnosis=DiagnosisResult(**dataclasses.asdict(diagnosis)) if diagnosis else None,
        mismatches=tuple(_mismatch(found.board, m) for m in found.mismatches),
        overrides=tuple(
            OverrideResult(**dataclasses.asdict(o)) for o in found.board.thresholds.overrides
        ),
        prompts=tuple(_prompt(found, t.answer) for t in found.targets),
        left_out=tuple(left_out),
        layers=_layers(found.board),
        acceptance=_acceptance(found),
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


def _gate(board: Board, name: str) -> GateResult:
    gate, limit, worst, failures = (
        GATES[name],
        board.limit(name),
        board.worst(name),
        board.failures(name),
    )
    shown = failures[0] if failures else worst
    return GateResult(
        name=name,
        stage=gate.stage,
        title=gate.title,
        status="skipped" if worst is None else "failed" if failures else "passed",
        metric=limit.metric,
        comparison="<=" if limit.better == "low" else ">=",
        tolerance=limit.value,
        threshold=limit.name,
        overridden=limit.overridden,
        origin=limit.origin,
        measured=None if worst is None else worst.value,
        count=len(board.measurements.get(name, ())),
        failed=len(failures),
        case=shown.case if shown else "",
        tensor=shown.tensor if shown else "",
        row=shown.row if shown else None,
        detail=_detail(board, name, shown, failed=bool(failures)),
        reason="" if worst else board.skipped.get(name, "nothing of its kind in these prompts"),
    )


def _detail(board: Board, gate: str, shown: Measurement | None, *, failed: bool) -> str:
    """Of a failure its own; else what the gate has counted over all prompts."""
    if shown is None:
        return ""
    counts = board.counts.get(gate)
    return (
        ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        if counts and not failed
        else shown.detail
    )


def _mismatch(board: Board, m: Mismatch) -> MismatchResult:
    first = first_tensor(board, m.case) if m.verdict == "failure" else None
    return MismatchResult(**dataclasses.asdict(m), first_tensor=first)


def _prompt(found: Found, answer: Answer) -> PromptResult:
    failed = [
        name for name in GATES if any(m.case == answer.name for m in found.board.failures(name))
    ]
    return PromptResult(
        name=answer.name,
        kind=answer.case.kind,
        prompt=_short(answer.case.question.prompt),
        prompt_tokens=answer.prompt_len,
        visual_tokens=int(answer.inputs.visual_rows.sum()),
        answer_tokens=len(answer.plain),
        answer=_short(found.engine.processor.decode(answer.plain)),
        failed_gates=tuple(failed),
    )


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 60]} [...] {text[-50:]}"


def _layers(board: Board) -> tuple[LayerError, ...]:
    """The worst prompt of each layer; its step is the decoder's, or the adding of its deepstack
    level.
    """
    worst: dict[int, dict[str, float]] = {}
    for gate in ("target.layers", "target.layer_steps"):
        for m in board.measurements.get(gate, ()):
            values = worst.setdefault(int(m.tensor.split(".")[1]), {})
            values[gate] = max(m.value, values.get(gate, 0.0))
    return tuple(
        LayerError(
            layer=k, output=worst[k].get("target.layers"), step=worst[k].get("target.layer_steps")
        )
        for k in sorted(worst)
    )


def _acceptance(found: Found) -> AcceptanceResult | None:
    counts = found.acceptance
    if not counts.reached:
        return None
    lengths = Counter(n for t in found.targets for n in t.answer.accepted_lengths)
    return AcceptanceResult(
        cycles=tuple(counts.reached),
        engine=tuple(e / n for e, n in zip(counts.engine, counts.reached, strict=True)),
        reference=tuple(r / n for r, n in zip(counts.reference, counts.reached, strict=True)),
        lengths=dict(sorted(lengths.items())),
    )


def _margins(found: Found) -> tuple[tuple[float, Literal["same", "tie", "failure"]], ...]:
    verdicts = {(m.case, m.step): m.verdict for m in found.mismatches if m.gate == "tokens.plain"}
    shown: list[tuple[float, Literal["same", "tie", "failure"]]] = []
    for t in found.targets:
        for step, margin in enumerate(margins(t.logits).tolist()):
            shown.append((margin, verdicts.get((t.answer.name, step), "same")))
    return tuple(shown)


def peak_memory() -> int | None:
    """Peak resident bytes of this process (VmHWM), where the system tells."""
    try:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(status["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
