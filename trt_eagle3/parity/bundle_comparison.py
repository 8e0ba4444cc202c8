"""Compare two bundles: two backends, two precisions or two versions.

The first bundle gives the expected values. Values are compared as far as the two answers have the
same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.checks.diagnose import diagnose_coarsely
from trt_eagle3.parity.checks.evidence import Evidence
from trt_eagle3.parity.checks.mismatch import first_difference
from trt_eagle3.parity.checks.registry import CHECKS, run_check
from trt_eagle3.parity.checks.thresholds import Thresholds
from trt_eagle3.parity.metrics import RowErrors, row_errors
from trt_eagle3.parity.record.answers import RecordedAnswer, served_answers
from trt_eagle3.parity.record.engine import RecordedForward, RecordingEngine
from trt_eagle3.parity.record.record import Record, record_answers
from trt_eagle3.parity.record.trace import logits_of, outputs_of, positions_of
from trt_eagle3.parity.record.workload import Case, bundled_cases, left_out, read_cases
from trt_eagle3.parity.reference.drafting import Acceptance
from trt_eagle3.parity.reference.expected import ExpectedAnswer
from trt_eagle3.parity.reference.target import VisionStates
from trt_eagle3.parity.report.result import Report
from trt_eagle3.parity.report.summary import Findings, summarise

__all__ = ["compare"]

_COARSE = ("float32", "float16", "bfloat16")

Progress = Callable[[str, int, int], object]


def compare(
    expected: Path,
    bundle: Path,
    *,
    suite: str = "quick",
    max_tokens: int = 32,
    prompts: Path | None = None,
    overrides: Mapping[str, float] | None = None,
    target_only: bool = False,
    tensor_parallel: int | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Compare ``bundle`` with the bundle ``expected``.

    The tolerances are those of the coarser dtype of the two.

    Args:
        target_only: ignore the drafts, and answer without speculation.
        tensor_parallel: devices that share the target of ``bundle``; None: as it was built.

    Raises:
        UserError: a bundle or the prompts are invalid, the targets differ, or only one bundle has a
            draft.
    """
    start = time.perf_counter()
    engines = [RecordingEngine(expected), RecordingEngine(bundle, tensor_parallel=tensor_parallel)]
    _check_shapes(engines)
    _choose_drafts(engines, target_only=target_only)
    tight = min(engines, key=lambda e: e.limits.max_seq_len)
    cases = read_cases(prompts) if prompts else bundled_cases(suite, tight, max_tokens)
    first, second = (_record(e, cases, max_tokens, progress) for e in engines)
    dtype = max((e.precision for e in engines), key=_COARSE.index)
    recorder = CheckRecorder(CHECKS.values(), Thresholds(dtype, overrides))
    evidence = _evidence(first, second)
    _run_checks(recorder, evidence, target_only=target_only)
    seconds = {"both bundles": round(time.perf_counter() - start, 3)}
    made = first.engine.record.engine
    return summarise(
        Findings(recorder, evidence, diagnose_coarsely(recorder), seconds),
        suite=str(prompts or suite),
        reference=f"{made.backend} in {made.dtype}: {expected}",
        mode="compare",
        other=first.engine,
        left_out=() if prompts else left_out(suite, cases),
    )


def _check_shapes(engines: Sequence[RecordingEngine]) -> None:
    specs = [e.spec for e in engines]
    shapes = [(s.num_layers, s.hidden_size, s.vocab_size) for s in specs]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{engines[0].path}, {engines[1].path}: bundles of different targets (layers, hidden "
            f"size, vocabulary: {shapes})"
        )


def _choose_drafts(engines: Sequence[RecordingEngine], *, target_only: bool) -> None:
    """Check that both bundles have a draft or neither has; with ``target_only`` drop the drafts."""
    if target_only:
        for engine in engines:
            engine.leave_out_draft()
        return
    having = [engine.manifest is not None for engine in engines]
    if having[0] != having[1]:
        some, none = sorted(engines, key=lambda e: e.manifest is None)
        raise UserError(
            f"{some.path} has a draft, {none.path} has none: they are not the same. "
            "To compare their targets alone: --target-only"
        )


def _record(
    engine: RecordingEngine, cases: Sequence[Case], max_tokens: int, progress: Progress
) -> Record:
    done = iter(range(1, 2 * len(cases) + 1))

    def step() -> None:
        progress(str(engine.path), next(done), 2 * len(cases))

    found = record_answers(engine, cases, max_tokens, step)
    engine.bundle.close_ranks()  # the other bundle may need them
    return found


def _run_checks(recorder: CheckRecorder, evidence: Evidence, *, target_only: bool) -> None:
    for m in recorder.values():
        run_check(evidence, m)
        if target_only and m.check.needs_draft:
            m.skip("the targets alone were compared")
    if not evidence.acceptance.recorded.reached and not target_only:
        recorder["draft.acceptance"].skip("the bundles do not speculate alike")


def _evidence(first: Record, second: Record) -> Evidence:
    """Build the evidence: the second bundle's record, with the first's values as expected."""
    expected = [_expected(first, second, i) for i in range(len(first.answers))]
    spec, manifest = first.engine.spec, first.engine.manifest
    acceptance = _acceptance(first, second)
    return Evidence(second, spec, manifest, expected, acceptance=acceptance)


def _expected(first: Record, second: Record, i: int) -> ExpectedAnswer:
    """Return one case, up to the first token that differs."""
    theirs, ours = first.answers[i], second.answers[i]
    same = first_difference(theirs.autoregressive, ours.autoregressive)
    rows = ours.prompt_len + same
    logits = _logits(theirs)
    known = min(same + 1, len(logits))
    answer = replace(
        ours,
        autoregressive=ours.autoregressive[:known],
        speculative=ours.speculative[:known],
    )
    return ExpectedAnswer(
        answer=answer,
        intermediates=second.intermediates[i],
        positions=torch.cat([positions_of(f) for f in theirs.autoregressive_forwards])[:rows],
        inputs=theirs.inputs,
        vision=_vision(theirs.vision),
        logits=logits,
        layer_errors=_layer_errors(first, second, i, min(rows, ours.num_rows)),
        aux_errors=_aux_errors(theirs, ours, rows),
    )


def _vision(seen: RecordedForward | None) -> VisionStates | None:
    if seen is None:
        return None
    embeds = seen.outputs["visual_embeds"]
    levels = seen.outputs.get("deepstack", torch.zeros(0, *embeds.shape))
    return VisionStates(embeds.float(), levels.float(), {})


def _logits(answer: RecordedAnswer) -> Tensor:
    """Return the logits of every token of an answer, float32 [A, V]."""
    forwards = answer.autoregressive_forwards
    found = {logit.row: logit.values for f in forwards for logit in logits_of(f)}
    return torch.stack([found[r] for r in range(answer.prompt_len - 1, answer.num_rows)]).float()


def _layer_errors(first: Record, second: Record, i: int, rows: int) -> list[RowErrors]:
    found = []
    for name, values in first.intermediates[i].items():
        if name in second.intermediates[i] and name.endswith(".output"):
            count = min(rows, len(values))
            errors = row_errors(second.intermediates[i][name][:count], values[:count].float())
            found.append(RowErrors(second.answers[i].name, name, errors))
    return found


def _aux_errors(theirs: RecordedAnswer, ours: RecordedAnswer, rows: int) -> list[RowErrors]:
    """Return errors of the rows that both ran; empty if the drafts read other layers."""
    name, forwards = "aux_hidden_states", [a.autoregressive_forwards for a in (ours, theirs)]
    if not all(name in some[0].outputs for some in forwards):
        return []
    found, wanted = (outputs_of(some, [f.outputs for f in some], name) for some in forwards)
    count = min(rows, len(found), len(wanted))
    if found.shape[1:] != wanted.shape[1:]:
        return []
    return [RowErrors(ours.name, name, row_errors(found[:count], wanted[:count].float()))]


def _acceptance(first: Record, second: Record) -> Acceptance:
    """Count accepted drafts by depth; empty if the bundles speculate with different settings."""
    counts = Acceptance()
    engines = [side.engine for side in (first, second)]
    configs = [engine.record.config.speculation for engine in engines]
    if any(engine.manifest is None for engine in engines) or configs[0] != configs[1]:
        return counts
    steps, served = configs[0].steps, served_answers(second.answers)
    for theirs, ours, counted in zip(first.answers, second.answers, served, strict=True):
        place = 1  # the prompt's forward emitted the first token
        for a, b in zip(ours.accepted_lengths[:-1], theirs.accepted_lengths[:-1], strict=False):
            counts.recorded.add(steps, a - 1, b - 1)
            if counted:
                counts.served.add(steps, a - 1, b - 1, ours.served_len - place)
            place += a
    return counts
