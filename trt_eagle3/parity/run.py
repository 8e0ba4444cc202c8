"""validate: a bundle and prompts become a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetSpec
from trt_eagle3.errors import EngineFailedError, UserError
from trt_eagle3.parity import SUITES, versus
from trt_eagle3.parity.answers import Answer, answer_cases, sample_cases
from trt_eagle3.parity.board import GATES, Board
from trt_eagle3.parity.checks import (
    check_meaning,
    check_processor,
    check_target_inputs,
    check_text,
    check_vision,
    expected_positions,
)
from trt_eagle3.parity.cycles import DraftRecord
from trt_eagle3.parity.draft import ReferenceDraft
from trt_eagle3.parity.draft_check import check_draft
from trt_eagle3.parity.drafting import Acceptance, DraftReference
from trt_eagle3.parity.integrity import check_files, check_tables
from trt_eagle3.parity.locate import Tools, diagnose
from trt_eagle3.parity.overflow import explain_overflow
from trt_eagle3.parity.processor import ProcessorReference
from trt_eagle3.parity.record import RecordingEngine
from trt_eagle3.parity.result import Report
from trt_eagle3.parity.sampling_check import check_sampling
from trt_eagle3.parity.sources import read_sources
from trt_eagle3.parity.summary import Found, summarise
from trt_eagle3.parity.surprise import NUM_SAMPLED, SETTING, check_surprise
from trt_eagle3.parity.target import TargetReference, VisionStates
from trt_eagle3.parity.target_check import (
    CheckedTarget,
    check_layers,
    check_logits,
    checked_target,
    layer_intermediates,
)
from trt_eagle3.parity.thresholds import Thresholds, read_overrides
from trt_eagle3.parity.together import ROUNDS, answer_together, check_together
from trt_eagle3.parity.token_check import Mismatch, check_tokens, check_verify
from trt_eagle3.parity.workload import Case, bundled_cases, left_out, read_cases

__all__ = ["MAX_TOKENS", "Progress", "Validation", "run_validation", "validate"]

Progress = Callable[[str, int, int], object]
"""Told a stage, what of it is done, and how much there is."""

MAX_TOKENS: Mapping[str, int] = {"quick": 32, "full": 128}
"""Tokens of an answer, by suite."""


def run_validation(
    bundles: Sequence[Path],
    *,
    suite: str,
    prompts: Path | None,
    compare: bool,
    target: str | None,
    draft: str | None,
    thresholds: Path | None,
    float64: bool,
    progress: Progress,
    target_only: bool = False,
) -> Report:
    """What ``trt-eagle3 validate`` does: ``validate`` one bundle, or ``versus.compare`` two.

    Raises:
        UserError: another number of bundles, or as those two.
    """
    overrides = read_overrides(thresholds) if thresholds else None
    if len(bundles) != 1 + compare:
        wanted = "two bundles, A and B" if compare else "one bundle; two need --compare"
        raise UserError(f"validate: expected {wanted}, got {len(bundles)}")
    if target_only and not compare:
        raise UserError(
            "validate: --target-only goes with --compare; a bundle against PyTorch is validated "
            "whole"
        )
    if not compare:
        (bundle,) = bundles
        return validate(
            bundle,
            suite=suite,
            prompts=prompts,
            target=target,
            draft=draft,
            overrides=overrides,
            float64=float64,
            progress=progress,
        )
    if target or draft or float64:
        raise UserError(
            "validate: --target, --draft and --float64 are about PyTorch's side; --compare has none"
        )
    return versus.compare(
        *bundles,
        suite=suite,
        max_tokens=MAX_TOKENS[suite],
        prompts=prompts,
        overrides=overrides,
        target_only=target_only,
        progress=progress,
    )


def validate(
    bundle: str | Path,
    *,
    suite: str = "quick",
    prompts: Path | None = None,
    target: str | None = None,
    draft: str | None = None,
    overrides: Mapping[str, float] | None = None,
    float64: bool = False,
    progress: Progress = lambda *_: None,
) -> Report:
    """Hold a bundle against PyTorch.

    Args:
        suite: the bundled prompts, ``quick`` or ``full``. prompts: a prompt file instead of them.
        target, draft: the checkpoints, where they are not any more where the build found them.
        overrides: threshold name -> value (``thresholds.read_overrides``).
        float64: compute the reference in float64; for small models.
    Raises:
        UserError: anything wrong with bundle, checkpoints or prompts.
    """
    if suite not in SUITES:
        raise UserError(f"suite: expected one of {', '.join(SUITES)}, got {suite!r}")
    engine = RecordingEngine(Path(bundle))
    max_tokens = MAX_TOKENS[suite]
    cases = read_cases(prompts) if prompts else bundled_cases(suite, engine, max_tokens)
    check = Validation(engine, overrides, torch.float64 if float64 else torch.float32, progress)
    found = check.run(cases, max_tokens, *read_sources(engine, target, draft))
    dtype = "float64" if float64 else "float32"
    return summarise(
        found,
        suite=str(prompts or suite),
        reference=f"transformers and plain PyTorch in {dtype}",
        left_out=() if prompts else left_out(suite, cases),
    )


class Validation:
    """One validation, stage by stage."""

    def __init__(
        self,
        engine: RecordingEngine,
        overrides: Mapping[str, float] | None = None,
        dtype: torch.dtype = torch.float32,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.engine = engine
        self.board = Board(Thresholds(engine.record.engine.dtype, overrides))
        self._dtype, self._progress = dtype, progress
        self._seconds: dict[str, float] = {}

    def run(
        self,
        cases: Sequence[Case],
        max_tokens: int,
        spec: TargetSpec,
        manifest: DraftManifest | None,
    ) -> Found:
        """Answer, compare, and look closer at what failed first.

        Raises:
            EngineFailedError: the target's logits are not finite numbers; it says why.
        """
        try:
            return self._run(cases, max_tokens, spec, manifest)
        except EngineFailedError as error:
            raise explain_overflow(spec, self.engine.record.engine.dtype) from error
        finally:
            self.engine.close()

    def _run(
        self,
        cases: Sequence[Case],
        max_tokens: int,
        spec: TargetSpec,
        manifest: DraftManifest | None,
    ) -> Found:
        engine, board = self.engine, self.board
        check_meaning(board, engine, spec, manifest)
        with self._stage("files", 1) as step:
            check_files(board, engine, spec, manifest)
            step()
        with self._stage("answers", len(cases) + len(cases[:NUM_SAMPLED])) as step:
            answers = answer_cases(engine, cases, max_tokens, step)
            sampled = sample_cases(engine, cases[:NUM_SAMPLED], max_tokens, SETTING, step)
        with self._stage("all at once", ROUNDS) as step:
            together = answer_together(engine, answers, max_tokens, step)
        reference = TargetReference.load(spec.path, self._dtype, engine.device)
        drafting = self._drafting(reference, manifest)
        check_tables(board, engine, reference, drafting)
        with self._stage("processor and vision", 2 * len(cases)) as step:
            seen = self._encode_images(reference, spec.path, answers, step)
        with self._stage("intermediate tensors", len(cases)) as step:
            bound = engine.release()
            intermediates = layer_intermediates(engine, bound["target"], answers, step)

        def embed(ids: Tensor) -> Tensor:
            return reference.embed(ids).cpu().to(engine.dtype)

        targets = []
        for answer, found, states in zip(answers, intermediates, seen, strict=True):
            positions = expected_positions(reference, answer)
            check_target_inputs(board, reference, answer, positions)
            targets.append(checked_target(reference, answer, found, states, positions))
        if not any(intermediates):
            board.skip(
                ("target.layers", "target.layer_steps"),
                "this backend gives no tensors inside its graphs",
            )
        with self._stage("decoder layers", reference.num_layers) as step:
            check_layers(board, reference, targets, manifest, step)
        with self._stage("tokens", len(targets)) as step:
            mismatches = self._check_tokens(reference, targets, step)
            mismatches += check_together(board, together, targets, embed, engine.processor.decode)
        acceptance = Acceptance()
        records = self._check_draft(drafting, targets, acceptance)
        with self._stage("sampling", 1) as step:
            check_sampling(
                board, [t.logits for t in targets], [torch.tensor(t.answer.plain) for t in targets]
            )
            check_surprise(board, sampled, embed)
            step()
        tools = Tools(engine, bound, reference, targets, drafting, records)
        with self._stage("diagnosis", 1) as step:
            diagnosis = diagnose(board, tools)
            step()
        return Found(board, engine, targets, mismatches, acceptance, diagnosis, self._seconds)

    def _encode_images(
        self,
        reference: TargetReference,
        checkpoint: Path,
        answers: Sequence[Answer],
        step: Callable[[], object],
    ) -> list[VisionStates | None]:
        """Processor and vision gates; what the reference sees in each case."""
        processor = ProcessorReference(checkpoint, reference, self.engine.processor)
        states: list[VisionStates | None] = []
        for answer in answers:
            inputs = check_processor(self.board, processor, answer)
            check_text(self.board, processor, answer)
            step()
            states.append(
                reference.vision(inputs.patches, inputs.grid_thw) if len(inputs.patches) else None
            )
            check_vision(self.board, answer, states[-1])
            step()
        return states

    def _check_tokens(
        self,
        reference: TargetReference,
        targets: Sequence[CheckedTarget],
        step: Callable[[], object],
    ) -> list[Mismatch]:
        check_logits(self.board, reference, targets)
        mismatches: list[Mismatch] = []
        for t in targets:
            mismatches += check_tokens(self.board, t, self.engine.processor.decode)
            table = reference.embed(t.answer.token_ids).cpu().to(self.engine.dtype)
            check_verify(self.board, t, table, self.engine.kept.columns)
            step()
        return mismatches

    def _drafting(
        self, reference: TargetReference, manifest: DraftManifest | None
    ) -> DraftReference | None:
        if manifest is None:
            return None
        draft = ReferenceDraft.load(manifest, self._dtype, reference.device)
        return DraftReference(draft, reference, self.engine.record.config.speculation)

    def _check_draft(
        self,
        drafting: DraftReference | None,
        targets: Sequence[CheckedTarget],
        acceptance: Acceptance,
    ) -> list[DraftRecord]:
        if drafting is None:
            names = [
                name
                for name in GATES
                if name.startswith(("draft.", "verify.", "target.aux", "tokens.spec"))
            ]
            self.board.skip(names, "a bundle without a draft")
            return []
        with self._stage("draft", len(targets)) as step:
            return check_draft(self.board, drafting, targets, acceptance, step)

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[Callable[[], object]]:
        done = iter(range(1, total + 1))
        self._progress(name, 0, total)
        start = time.perf_counter()
        yield lambda: self._progress(name, next(done, total), total)
        self._seconds[name] = round(time.perf_counter() - start, 3)
