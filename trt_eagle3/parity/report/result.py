"""The report as data: the contents of ``report.json``. ``docs/validate.md`` describes every key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from rich.text import Text

from trt_eagle3.errors import CheckFailedError
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.parity.checks.check_recorder import Status
from trt_eagle3.prompts.kept import PromptsOrigin

__all__ = [
    "SCHEMA_VERSION",
    "AcceptanceResult",
    "DiagnosisResult",
    "CheckResult",
    "LayerError",
    "MismatchResult",
    "OverrideResult",
    "PromptResult",
    "Report",
    "Subject",
]

SCHEMA_VERSION = 4
_NEARLY = 0.9

_Number = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "Infinity"}]})]
"""A number; infinity, which JSON lacks, is the text ``Infinity``."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Subject(_Part):
    """A bundle: the one that was checked, or the one it was compared with.

    Attributes:
        machine: name of the GPU, or of the processor and its cores.
        max_seq_len: of its limits.
        draft_overrides: fields that its config sets, in place of the values in the draft's files.
    """

    path: str
    name: str
    backend: str
    device: str
    machine: str
    dtype: str
    tool_version: str
    created_at: str
    target: str
    draft: str | None
    max_seq_len: int
    draft_overrides: Mapping[str, str]


class CheckResult(_Part):
    """One check: one line of the report.

    Attributes:
        status: ``skipped``: the bundle has the check's subject, but it was not compared.
            ``not_applicable``: the bundle lacks it.
        reason: why, for these two.
        measured: the worst value; None if nothing was compared.
        comparison: ``<=`` or ``>=``, to ``tolerance``.
        used: share of the tolerance that is used; 0 is perfect, 1 the tolerance, None if nothing
            may differ.
        compared: number of rows, tokens, draws, fields and files; above 0 in every check that
            passed.
        count: number of measurements, each the worst of some values.
        failed: number of measurements outside the tolerance.
        case, tensor, row: location of the worst measurement.
        threshold: the name to override it by.
        origin: reason for the tolerance.
    """

    name: str
    stage: str
    title: str
    status: Status
    metric: str
    comparison: Literal["<=", ">="]
    tolerance: _Number
    threshold: str
    overridden: bool
    origin: str
    measured: _Number | None = None
    used: _Number | None = None
    compared: int = 0
    count: int = 0
    failed: int = 0
    case: str = ""
    tensor: str = ""
    row: int | None = None
    detail: str = ""
    reason: str = ""


class DiagnosisResult(_Part):
    """The first failure: the earliest stage, and its first tensor outside the tolerance."""

    stage: str
    check: str
    case: str
    tensor: str
    row: int | None
    value: _Number
    bound: _Number
    detail: str


class QuantisationResult(_Part):
    """The cost of quantisation, its format and the 16-bit checkpoint.

    See ``parity.reference.quantisation_cost.QuantisationCost``.
    """

    weights: Mapping[str, int]
    provenance: str
    original: str
    rows: int
    kl_mean: _Number
    kl_max: _Number
    top1: float
    first_accepted: float | None
    first_accepted_16bit: float | None
    acceptance_length: float | None
    acceptance_length_16bit: float | None

    def line(self) -> str:
        """Return the cost in one line."""
        accepted = ""
        if self.first_accepted is not None and self.first_accepted_16bit is not None:
            accepted = (
                f", first draft token right {self.first_accepted:.1%} "
                f"(16-bit {self.first_accepted_16bit:.1%})"
            )
        if self.acceptance_length is not None and self.acceptance_length_16bit is not None:
            change = self.acceptance_length - self.acceptance_length_16bit
            accepted += f", acceptance length {self.acceptance_length:.2f} ({change:+.2f})"
        return (
            f"quantisation costs, against {self.original}: KL {self.kl_mean:.2g} nats a token (at "
            f"most {self.kl_max:.2g}), best token the same in {self.top1:.1%} of {self.rows} rows"
            f"{accepted}"
        )


class MismatchResult(_Part):
    """A token that differs from the expected one; margins are logits of the reference.

    See ``parity.checks.mismatch.Mismatch``.
    """

    check: str
    case: str
    step: int
    expected: int
    got: int
    expected_text: str
    got_text: str
    margin: _Number
    expected_margin: _Number
    got_margin: _Number
    bound: float
    kind: Literal["tie", "failure"]
    first_tensor: str | None


class OverrideResult(_Part):
    """A tolerance that the user set."""

    name: str
    ours: float
    used: float


class PromptResult(_Part):
    """One prompt.

    Attributes:
        answer_tokens: compared tokens, without speculation.
        answer: its text up to the first end token; long texts are cut.
    """

    name: str
    kind: str
    prompt: str
    prompt_tokens: int
    visual_tokens: int
    answer_tokens: int
    answer: str
    failed_checks: tuple[str, ...]


class LayerError(_Part):
    """A decoder layer's error over all prompts: of its output, and of its own step alone."""

    layer: int
    output: _Number | None
    step: _Number | None


class AcceptanceResult(_Part):
    """Acceptance by draft position, over the cycles that could accept there.

    Only the user's own prompts count (all prompts if there are none), each up to its answer's end
    token.

    Attributes:
        prompts: ``file``: those of ``--prompts``; ``bundle``: those that the bundle keeps;
            ``generic``: those of the suite.
        lengths: tokens that a verify forward emitted -> forwards.
    """

    prompts: PromptsOrigin
    cycles: tuple[int, ...]
    engine: tuple[float, ...]
    reference: tuple[float, ...]
    lengths: Mapping[int, int]


class Report(_Part):
    """A validation.

    Attributes:
        mode: ``reference`` (a bundle against PyTorch) or ``compare`` (a bundle against another).
        reference: the origin of the expected values.
        left_out: prompts of the suite that exceed the bundle's limits.
        margins: per token of the answers without speculation, the reference's top-2 margin in
            probability, and whether the token is the same, a tie or a failure.
        seconds: per stage.
        peak_memory: bytes of this process; None if the system does not report it.
    """

    schema_version: int = SCHEMA_VERSION
    mode: Literal["reference", "compare"]
    passed: bool
    created_at: str
    tool_version: str
    bundle: Subject
    other: Subject | None
    reference: str
    suite: str
    checks: tuple[CheckResult, ...]
    diagnosis: DiagnosisResult | None
    mismatches: tuple[MismatchResult, ...]
    overrides: tuple[OverrideResult, ...]
    prompts: tuple[PromptResult, ...]
    left_out: tuple[str, ...]
    layers: tuple[LayerError, ...]
    acceptance: AcceptanceResult | None
    quantisation: QuantisationResult | None = None
    margins: tuple[tuple[float, Literal["same", "tie", "failure"]], ...]
    seconds: Mapping[str, float]
    peak_memory: int | None

    def to_json(self) -> str:
        """Return the text of ``report.json``."""
        return self.model_dump_json(indent=2)

    def check(self) -> None:
        """Raise if a check failed.

        Raises:
            CheckFailedError: names the failed checks and the first failure.
        """
        failed = [g.name for g in self.checks if g.status == "failed"]
        if not failed:
            return
        found = self.diagnosis
        where = (
            f"; first in {found.stage}: {found.tensor} ({found.value:.3g}, allowed "
            f"{found.bound:.3g})"
            if found
            else ""
        )
        raise CheckFailedError(
            f"{self.bundle.path}: {len(failed)} checks failed: {', '.join(failed)}{where}"
        )

    def table(self) -> TextTable:
        """The checks, one row each."""
        table = TextTable("", "check", "measured", "allowed", "what")
        marks = {
            "passed": Text("ok", "green"),
            "failed": Text("FAIL", "red"),
            "skipped": Text("--", "dim"),
            "not_applicable": Text("n/a", "dim"),
        }
        for g in self.checks:
            star = " *" if g.overridden else ""
            measured = "" if g.measured is None else _short(g.measured)
            allowed = "" if g.measured is None else f"{g.comparison} {g.tolerance:.8g}{star}"
            title = g.reason or g.title
            table.add_row(marks[g.status], g.name, measured, allowed, title)
        return table

    def num_checks(self, status: Status) -> int:
        """Number of checks with ``status``."""
        return sum(g.status == status for g in self.checks)

    @property
    def not_applicable(self) -> tuple[str, ...]:
        """Checks that do not apply to the bundle, by reason."""
        return self._by_reason("not_applicable")

    def _by_reason(self, status: Status) -> tuple[str, ...]:
        reasons: dict[str, list[str]] = {}
        for g in self.checks:
            if g.status == status:
                reasons.setdefault(g.reason, []).append(g.name)
        return tuple(f"{', '.join(names)} ({reason})" for reason, names in reasons.items())

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What the report does not cover: skipped checks and why, skipped prompts, longer
        sequences.
        """
        found = list(self._by_reason("skipped"))
        if self.left_out:
            found.append(
                f"the suite's prompts {', '.join(self.left_out)} (longer than this bundle's "
                "limits, or images for a target that reads text only)"
            )
        longest = max((p.prompt_tokens + p.answer_tokens for p in self.prompts), default=0)
        if longest < _NEARLY * self.bundle.max_seq_len:
            found.append(
                f"sequences longer than {longest} of max_seq_len {self.bundle.max_seq_len} tokens"
            )
        return tuple(found)

    def lines(self, files: tuple[str, ...]) -> list[str]:
        """Return the lines after the table.

        They list failures, changed tolerances, checks that do not apply or were skipped, totals
        and files.
        """
        found = [f"FAIL {g.name}: {_place(g)}" for g in self.checks if g.status == "failed"]
        found += [
            f"* tolerance set by the user: {o.name} = {o.used:g} instead of {o.ours:g}"
            for o in self.overrides
        ]
        found += [
            f"the draft is read with the config's override: {name} = {value}"
            for name, value in self.bundle.draft_overrides.items()
        ]
        found += [self.quantisation.line()] if self.quantisation else []
        found += [f"not applicable: {what}" for what in self.not_applicable]
        found += [f"not checked: {what}" for what in self.not_checked]
        ties = sum(m.kind == "tie" for m in self.mismatches)
        count, tokens = len(self.prompts), len(self.margins)
        asked = f"{count} prompt{'s' if count > 1 else ''}, {tokens} tokens"
        seconds = sum(self.seconds.values())
        sums = (
            f"{self.num_checks('passed')} checks hold, {self.num_checks('failed')} failed, "
            f"{self.num_checks('skipped')} skipped, {self.num_checks('not_applicable')} not "
            "applicable"
        )
        found.append(f"{sums}; {asked}, {ties} ties; {seconds:.1f} s")
        return [*found, *(f"wrote {file}" for file in files)]


def _place(check: CheckResult) -> str:
    """Describe where a check failed first."""
    row = "" if check.row is None else f"row {check.row}"
    more = f", and {check.failed - 1} more" if check.failed > 1 else ""
    return ", ".join(filter(None, (check.case, check.tensor, row, check.detail))) + more


def _short(value: float) -> str:
    """Format a value in three digits, or in eight if it lies between 0.99 and 1."""
    return f"{value:.8g}" if 0.99 < value < 1 else f"{value:.3g}"
