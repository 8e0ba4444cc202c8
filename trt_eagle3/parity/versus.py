"""Two bundles against each other: two backends, two precisions, two versions. The first gives the
expected values.

What both computed is compared as far as their answers have the same tokens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.errors import UserError
from trt_eagle3.parity.answers import Answer, answer_cases
from trt_eagle3.parity.board import GATES, Board
from trt_eagle3.parity.checks import check_meaning, check_vision, compare_inputs
from trt_eagle3.parity.drafting import Acceptance
from trt_eagle3.parity.locate import diagnose_coarsely
from trt_eagle3.parity.metrics import row_errors
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.result import Report
from trt_eagle3.parity.summary import Found, summarise
from trt_eagle3.parity.target import VisionStates
from trt_eagle3.parity.target_check import CheckedTarget, compare_logits, layer_intermediates
from trt_eagle3.parity.thresholds import Thresholds
from trt_eagle3.parity.token_check import check_tokens
from trt_eagle3.parity.trace import logits_of, outputs_of, positions_of
from trt_eagle3.parity.workload import Case, bundled_cases, left_out, read_cases

__all__ = ["compare"]

_COARSE = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class _Side:
    """One bundle's answers, and its layer outputs [n, H] by name."""

    engine: RecordingEngine
    answers: Sequence[Answer]
    intermediates: Sequence[Mapping[str, Tensor]]


def compare(
    expected: Path,
    bundle: Path,
    *,
    suite: str = "quick",
    max_tokens: int = 32,
    prompts: Path | None = None,
    overrides: Mapping[str, float] | None = None,
    target_only: bool = False,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Report:
    """Hold ``bundle`` against the bundle ``expected``, with the tolerances of the coarser type of
    the two.

    Args:
        target_only: leave the drafts out, and answer plainly.

    Raises:
        UserError: anything wrong with bundles or prompts, bundles of different targets, or only one
            with a draft.
    """
    start = time.perf_counter()
    engines = [RecordingEngine(path) for path in (expected, bundle)]
    shapes = [
        (e.spec.text.num_layers, e.spec.text.hidden_size, e.spec.text.vocab_size) for e in engines
    ]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{expected}, {bundle}: bundles of different targets (layers, hidden size, vocabulary: "
            f"{shapes})"
        )
    _choose_drafts(engines, target_only=target_only)
    tight = min(engines, key=lambda e: e.limits.max_seq_len)
    cases = read_cases(prompts) if prompts else bundled_cases(suite, tight, max_tokens)
    first, second = (_side(e, cases, max_tokens, progress) for e in engines)
    dtype = max((e.record.engine.dtype for e in engines), key=_COARSE.index)
    board = Board(Thresholds(dtype, overrides))
    check_meaning(board, second.engine, first.engine.spec, first.engine.manifest)
    targets = [_check(board, first, second, i) for i in range(len(cases))]
    mismatches = [
        m for t in targets for m in check_tokens(board, t, second.engine.processor.decode)
    ]
    acceptance = _acceptance(board, first, second)
    _skip_the_rest(board, target_only=target_only)
    seconds = {"both bundles": round(time.perf_counter() - start, 3)}
    found = Found(
        board, second.engine, targets, mismatches, acceptance, diagnose_coarsely(board), seconds
    )
    name = f"{first.engine.record.engine.backend} in {first.engine.record.engine.dtype}: {expected}"
    return summarise(
        found,
        suite=str(prompts or suite),
        reference=name,
        mode="compare",
        other=first.engine,
        left_out=() if prompts else left_out(suite, cases),
    )


def _choose_drafts(engines: Sequence[RecordingEngine], *, target_only: bool) -> None:
    """Two bundles of which one has a draft are not the same thing, whatever their targets are."""
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


def _side(
    engine: RecordingEngine,
    cases: Sequence[Case],
    max_tokens: int,
    progress: Callable[[str, int, int], object],
) -> _Side:
    done = iter(range(1, 2 * len(cases) + 1))
    stage = f"{engine.path}"

    def step() -> None:
        progress(stage, next(done), 2 * len(cases))

    answers = answer_cases(engine, cases, max_tokens, step)
    intermediates = layer_intermediates(engine, engine.release()["target"], answers, step)
    return _Side(engine, answers, intermediates)


def _check(board: Board, first: _Side, second: _Side, i: int) -> CheckedTarget:
    """Everything of one case, up to where the answers part; the logits are the first bundle's."""
    theirs, ours = first.answers[i], second.answers[i]
    case = ours.name
    compare_inputs(board, ours.inputs, theirs.inputs, case)
    if theirs.vision is not None:
        out = theirs.vision.outputs
        levels = out.get("deepstack", torch.zeros(0, *out["visual_embeds"].shape))
        check_vision(board, ours, VisionStates(out["visual_embeds"].float(), levels.float(), {}))
    same = _common(theirs.plain, ours.plain)
    rows = ours.prompt_len + same
    for name, values in first.intermediates[i].items():
        if name in second.intermediates[i] and not name.endswith("pre_deepstack"):
            count = min(rows, len(values), ours.num_rows)
            errors = row_errors(second.intermediates[i][name][:count], values[:count].float())
            board.add_rows("target.layers", errors, case, name)
    _check_rows(board, theirs, ours, rows)
    logits = torch.stack(
        [_rows_of_logits(theirs)[row] for row in range(ours.prompt_len - 1, theirs.num_rows)]
    )
    mine = _rows_of_logits(ours)
    kept = [row for row in range(ours.prompt_len - 1, min(rows, ours.num_rows)) if row in mine]
    compare_logits(
        board,
        case,
        torch.stack([mine[r] for r in kept]),
        logits[: len(kept)].float(),
        ours.prompt_len - 1,
    )
    known = min(same + 1, len(logits))
    cut = dataclasses.replace(ours, plain=ours.plain[:known], speculative=ours.speculative[:known])
    hidden = torch.empty(0)
    return CheckedTarget(
        cut, second.intermediates[i], hidden, hidden, torch.empty(0, 3), logits=logits.float()
    )


def _check_rows(board: Board, theirs: Answer, ours: Answer, rows: int) -> None:
    """Positions and aux states of the rows that both ran."""
    places = [torch.cat([positions_of(p) for p in a.plain_passes])[:rows] for a in (ours, theirs)]
    count = min(map(len, places))
    board.add_exact(
        "target.position_ids", places[0][:count], places[1][:count], ours.name, "position_ids"
    )
    if all("aux_hidden_states" in a.plain_passes[0].outputs for a in (ours, theirs)):
        found, wanted = (
            outputs_of(a.plain_passes, [p.outputs for p in a.plain_passes], "aux_hidden_states")[
                :count
            ]
            for a in (ours, theirs)
        )
        if found.shape == wanted.shape:
            board.add_rows(
                "target.aux", row_errors(found, wanted.float()), ours.name, "aux_hidden_states"
            )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def _rows_of_logits(answer: Answer) -> dict[int, Tensor]:
    return {logit.row: logit.values for p in answer.plain_passes for logit in logits_of(p)}


def _acceptance(board: Board, first: _Side, second: _Side) -> Acceptance:
    """Shares of verify passes that accepted so deep, where both speculate alike."""
    counts = Acceptance()
    configs = [side.engine.record.config.speculation for side in (first, second)]
    if None in (first.engine.manifest, second.engine.manifest) or configs[0] != configs[1]:
        board.skip(["draft.acceptance"], "the bundles do not speculate alike")
        return counts
    for theirs, ours in zip(first.answers, second.answers, strict=True):
        for a, b in zip(ours.accepted_lengths[:-1], theirs.accepted_lengths[:-1], strict=False):
            counts.add(configs[0].steps, a - 1, b - 1)
    for position, n in enumerate(counts.reached):
        rates = counts.engine[position] / n, counts.reference[position] / n
        detail = f"{rates[0]:.3f}, the other bundle {rates[1]:.3f}"
        board.add(
            "draft.acceptance", abs(rates[0] - rates[1]), "", f"position {position}", None, detail
        )
    return counts


def _skip_the_rest(board: Board, *, target_only: bool) -> None:
    left = [name for name in GATES if name not in board.measurements]
    if target_only:
        drafted = [name for name in left if name.startswith(("draft.", "verify.", "tokens.spec"))]
        board.skip(drafted, "the targets alone were compared")
    board.skip([name for name in left if name not in board.skipped], "only against PyTorch")
