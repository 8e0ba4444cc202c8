"""Validate a bundle: from a bundle and prompts to a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.errors import EngineFailedError, RankFailedError, UserError
from trt_eagle3.families.registry import family_of
from trt_eagle3.parity import SUITES, bundle_comparison
from trt_eagle3.parity.checks.check_recorder import CheckRecorder
from trt_eagle3.parity.checks.diagnose import diagnose
from trt_eagle3.parity.checks.evidence import Evidence, PyTorch
from trt_eagle3.parity.checks.registry import CHECKS, run_check
from trt_eagle3.parity.checks.thresholds import Thresholds, read_overrides
from trt_eagle3.parity.record.engine import RecordingEngine
from trt_eagle3.parity.record.record import Record, record_engine
from trt_eagle3.parity.record.workload import Case, bundled_cases, left_out, read_cases
from trt_eagle3.parity.reference.autoregressive_parity import AutoregressiveParity
from trt_eagle3.parity.reference.block_parity import BlockParity
from trt_eagle3.parity.reference.draft_parity import DraftParity
from trt_eagle3.parity.reference.drafting import AutoregressiveReference, DraftReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer, expect_prompts
from trt_eagle3.parity.reference.followed import with_speculation
from trt_eagle3.parity.reference.overflow import explain_overflow
from trt_eagle3.parity.reference.quantisation_cost import quantisation_cost
from trt_eagle3.parity.reference.rounding import RoundingReference
from trt_eagle3.parity.reference.sources import read_sources, read_unquantised
from trt_eagle3.parity.reference.target import TargetReference, load_reference
from trt_eagle3.parity.reference.target_rows import RouterSlack, run_layers
from trt_eagle3.parity.report.result import Report
from trt_eagle3.parity.report.summary import Findings, summarise

__all__ = ["MAX_TOKENS", "Progress", "Validation", "run_validation", "validate"]

Progress = Callable[[str, int, int], object]
"""Called with a stage, the number of finished parts, and the total."""

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
    original: str | None = None,
    thresholds: Path | None,
    float64: bool,
    progress: Progress,
    target_only: bool = False,
    tensor_parallel: int | None = None,
) -> Report:
    """Run ``trt-eagle3 validate``: ``validate`` one bundle, or ``compare`` two.

    Raises:
        UserError: the number of bundles is wrong, or as in ``validate`` and ``compare``.
    """
    overrides = read_overrides(thresholds) if thresholds else None
    pytorch = bool(target or draft or original or float64)
    _check_arguments(len(bundles), compare=compare, target_only=target_only, pytorch=pytorch)
    if compare:
        return bundle_comparison.compare(
            *bundles,
            suite=suite,
            max_tokens=MAX_TOKENS[suite],
            prompts=prompts,
            overrides=overrides,
            target_only=target_only,
            tensor_parallel=tensor_parallel,
            progress=progress,
        )
    return validate(
        bundles[0],
        suite=suite,
        prompts=prompts,
        target=target,
        draft=draft,
        original=original,
        overrides=overrides,
        float64=float64,
        tensor_parallel=tensor_parallel,
        progress=progress,
    )


def _check_arguments(num_bundles: int, *, compare: bool, target_only: bool, pytorch: bool) -> None:
    """Reject conflicting options; ``pytorch``: whether an option of the reference is set."""
    if num_bundles != 1 + compare:
        wanted = "two bundles, A and B" if compare else "one bundle; two need --compare"
        raise UserError(f"validate: expected {wanted}, got {num_bundles}")
    if target_only and not compare:
        raise UserError(
            "validate: --target-only needs --compare; against PyTorch the whole bundle is validated"
        )
    if compare and pytorch:
        raise UserError(
            "validate: --target, --draft, --original and --float64 set the PyTorch reference; "
            "--compare has none"
        )


def validate(
    bundle: str | Path,
    *,
    suite: str = "quick",
    prompts: Path | None = None,
    target: str | None = None,
    draft: str | None = None,
    original: str | None = None,
    overrides: Mapping[str, float] | None = None,
    float64: bool = False,
    tensor_parallel: int | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Compare a bundle with PyTorch.

    Args:
        suite: the bundled prompts, ``quick`` or ``full``.
        prompts: a prompt file to use in place of the suite.
        target: the target checkpoint, if it has moved since the build.
        draft: the draft checkpoint, if it has moved since the build.
        original: the 16-bit checkpoint of a quantised target, so that the report contains the cost
            of quantisation. Not needed if the build quantised the target.
        overrides: threshold name -> value (``thresholds.read_overrides``).
        float64: compute the reference in float64; for small models.
        tensor_parallel: devices that share the target; None: as the bundle was built.
    Raises:
        UserError: the bundle, a checkpoint or the prompts are invalid.
    """
    if suite not in SUITES:
        raise UserError(f"suite: expected one of {', '.join(SUITES)}, got {suite!r}")
    engine = RecordingEngine(Path(bundle), tensor_parallel=tensor_parallel)
    max_tokens = MAX_TOKENS[suite]
    cases = read_cases(prompts) if prompts else bundled_cases(suite, engine, max_tokens)
    check = Validation(engine, overrides, torch.float64 if float64 else torch.float32, progress)
    sources = read_sources(engine, target, draft)
    unquantised = read_unquantised(engine, sources[0], target, original)
    if unquantised is None and engine.record.kv_scales:
        unquantised = sources[0]
    found = check.run(cases, max_tokens, *sources, unquantised)
    dtype = "float64" if float64 else "float32"
    return summarise(
        found,
        suite=str(prompts or suite),
        reference=f"transformers and plain PyTorch in {dtype}",
        left_out=() if prompts else left_out(suite, cases),
    )


class Validation:
    """Run one validation, stage by stage.

    ``left_out``: names of checks to skip. Data that only they need is not recorded.
    """

    def __init__(
        self,
        engine: RecordingEngine,
        overrides: Mapping[str, float] | None = None,
        dtype: torch.dtype = torch.float32,
        progress: Progress = lambda *_: None,
        left_out: Collection[str] = (),
    ) -> None:
        self.engine = engine
        own = {"kv_attention": engine.record.engine.dtype}
        thresholds = Thresholds(engine.precision, overrides, own)
        self.recorder = CheckRecorder(CHECKS.values(), thresholds)
        self._dtype, self._progress, self._left_out = dtype, progress, left_out
        self._seconds: dict[str, float] = {}

    def run(
        self,
        cases: Sequence[Case],
        max_tokens: int,
        spec: TargetCheckpoint,
        manifest: DraftManifest | None,
        original: TargetCheckpoint | None = None,
    ) -> Findings:
        """Record, compute the reference, check, and diagnose the first failure.

        Raises:
            EngineFailedError: the target's logits are not finite; the message gives the reason.
        """
        try:
            record = self._record(cases, max_tokens)
            evidence = self._refer(record, spec, manifest)
            if original is not None:
                evidence = self._compare_original(evidence, original)
            self._check(evidence)
            with self._stage("diagnosis", 1) as step:
                diagnosis = diagnose(self.recorder, evidence)
                step()
            return Findings(self.recorder, evidence, diagnosis, self._seconds)
        except RankFailedError:
            raise
        except EngineFailedError as error:
            raise explain_overflow(spec, self.engine.record.engine.dtype) from error
        finally:
            self.engine.close()

    def _record(self, cases: Sequence[Case], max_tokens: int) -> Record:
        return record_engine(
            self.engine,
            cases,
            max_tokens,
            self._stage,
            sampling=self._wanted("sampling."),
            batching=self._wanted("batch."),
            options=self._wanted("options."),
            serving=self._wanted("serve."),
        )

    def _wanted(self, prefix: str) -> bool:
        return any(name.startswith(prefix) and name not in self._left_out for name in CHECKS)

    def _refer(
        self, record: Record, spec: TargetCheckpoint, manifest: DraftManifest | None
    ) -> Evidence:
        """Compute the reference's values for the recorded answers."""
        scales = self.engine.record.kv_scales
        reference = load_reference(spec, self._dtype, self.engine.device, scales)
        processor = family_of(spec).processor_reference(spec.path, reference, self.engine.processor)
        with self._stage("reference: prompts", 2 * len(record.answers)) as step:
            expected = expect_prompts(record, reference, processor, step)
        with self._stage("reference: decoder layers", reference.num_layers) as step:
            run_layers(reference, expected, manifest, step, self._router_slack)
        rounding = self._rounding(spec, expected)
        self._follow_speculation(record, reference, expected, manifest)
        pytorch = PyTorch(reference, None, rounding)
        evidence = Evidence(record, spec, manifest, expected, pytorch=pytorch)
        return self._refer_draft(evidence, manifest) if manifest else evidence

    def _follow_speculation(
        self,
        record: Record,
        reference: TargetReference,
        expected: Sequence[ExpectedAnswer],
        manifest: DraftManifest | None,
    ) -> None:
        """Recompute answers whose forwards with speculation chose other experts."""
        for e in expected:
            e.with_speculation = with_speculation(record, reference, e)
        others = [e.with_speculation for e in expected if e.with_speculation is not None]
        if others:
            with self._stage("reference: experts with speculation", reference.num_layers) as step:
                run_layers(reference, others, manifest, step, self._router_slack)

    @property
    def _router_slack(self) -> RouterSlack:
        """Allowed error of router logits: that of the layers' outputs, which they multiply."""
        limits = self.recorder.thresholds
        return RouterSlack(limits["layer_step"].value, limits["layer_output"].value)

    def _refer_draft(self, evidence: Evidence, manifest: DraftManifest) -> Evidence:
        drafting = self._draft_parity(evidence.reference, manifest)
        with self._stage("reference: draft", len(evidence.expected)) as step:
            drafts, acceptance = drafting.compare(evidence.record, evidence.expected, step)
        assert evidence.pytorch is not None
        pytorch = replace(evidence.pytorch, drafting=drafting)
        return replace(evidence, drafts=drafts, acceptance=acceptance, pytorch=pytorch)

    def _draft_parity(self, target: TargetReference, manifest: DraftManifest) -> DraftParity:
        """Load the draft's reference, and return what compares with it."""
        kind, device = kind_of(manifest), target.device
        draft = kind.reference(manifest, self._dtype, device)
        speculation = self.engine.record.config.speculation
        if isinstance(draft, BlockReference):

            def make(dtype: torch.dtype) -> BlockReference:
                return BlockReference.load(draft.manifest, dtype, device)

            reference = DraftReference(draft, target, speculation)
            return BlockParity(draft, reference, make, getattr(torch, self.engine.precision))
        return AutoregressiveParity(AutoregressiveReference(draft, target, speculation))

    def _rounding(
        self, spec: TargetCheckpoint, expected: Sequence[ExpectedAnswer]
    ) -> RoundingReference:
        """Return what the reference loses in the dtype that sets the tolerances."""
        narrow = getattr(torch, self.engine.precision)
        wide = torch.float64 if narrow == torch.float32 else self._dtype
        device, scales = self.engine.device, self.engine.record.kv_scales
        make = partial(load_reference, spec, device=device, kv_scales=scales)

        def made_narrow() -> TargetReference:
            reference = copy(make(dtype=narrow))  # shared references must not be rounded
            reference.activations = self.engine.record.config.engine.activations
            return reference

        return RoundingReference(made_narrow, partial(make, dtype=wide), expected)

    def _compare_original(self, evidence: Evidence, original: TargetCheckpoint) -> Evidence:
        """Measure what quantisation changes, on the same tokens."""
        reference = load_reference(original, self._dtype, self.engine.device)
        with self._stage("reference: 16-bit target", reference.num_layers) as step:
            cost = quantisation_cost(reference, evidence.expected, evidence.drafting, step)
        return replace(evidence, original=original, cost=cost)

    def _check(self, evidence: Evidence) -> None:
        """Run the registry's checks, stage by stage."""
        for stage, found in groupby(self.recorder.values(), key=lambda m: m.check.stage):
            measurements = list(found)
            with self._stage(f"check: {stage}", len(measurements)) as step:
                for m in measurements:
                    run_check(evidence, m, self._left_out)
                    step()

    @contextmanager
    def _stage(self, name: str, total: int) -> Iterator[Callable[[], object]]:
        done = iter(range(1, total + 1))
        self._progress(name, 0, total)
        start = time.perf_counter()
        yield lambda: self._progress(name, next(done), total)
        seconds = self._seconds.get(name, 0.0) + time.perf_counter() - start
        self._seconds[name] = round(seconds, 3)
