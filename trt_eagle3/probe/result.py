"""Result of a probe: ranked interpretations, the best one, and the override lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import yaml

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.errors import CheckFailedError
from trt_eagle3.io.terminal_text import TextTable
from trt_eagle3.probe.interpretation import Interpretation, alternatives
from trt_eagle3.probe.score import Baseline
from trt_eagle3.probe.search import Contrast, SearchResult, Standing, contrast
from trt_eagle3.prompts.kept import GENERIC_NOTE, PromptsOrigin
from trt_eagle3.spec import RopeSpec, TargetSpec

__all__ = ["ProbeReport", "RankedInterpretation", "make_report"]

_MAX_ROWS = 16
_MIN_DIVERGENCE = 1.0  # nats; below it a draft predicts well, however repetitive the answers are
_MIN_TOKENS = 100  # the entropy of fewer tokens' own frequencies is far too low

ProbeFinding = Literal["right", "better", "prompts", "another target"]
"""The manifest is right; another interpretation is better; or nothing fits: the prompts do not fit,
or the draft is one of another target (or damaged), because it is right by chance only.
"""
_ADVICE: Mapping[ProbeFinding, str] = {
    "another target": "a draft of another target that fits in shape looks like this. Check that "
    "the draft was trained for this target, then its weights and its vocabulary map",
    "prompts": "the draft was trained on other texts. Give prompts like those: --prompts FILE",
}
_CLOSING_LINES: Mapping[ProbeFinding, str] = {
    "right": "the draft is read correctly",
    "better": "another interpretation is better: build with the overrides above",
    "another target": "nothing fits, case 1: right by chance only",
    "prompts": "nothing fits, case 2: above chance, so these prompts do not fit",
}
"""The last line of the output of each finding; short, so that it is not wrapped on 80 columns."""


class NothingFitsError(CheckFailedError):
    """No interpretation of the draft fits these prompts."""

    exit_code = 4


@dataclass(frozen=True)
class RankedInterpretation:
    """An interpretation and its score; ``contrast`` compares it with the manifest in use."""

    interpretation: Interpretation
    cross_entropy: float
    position_0: float
    acceptance_length: float
    contrast: Contrast


@dataclass(frozen=True)
class ProbeReport:
    """The result; ``docs/probe.md`` describes its JSON form.

    Attributes:
        interpretations: those significantly better than the manifest in use, the manifest, and the
            others; each part by cross-entropy.
        best: the interpretation to use; without changes if the manifest in use is the best.
        silent: factors for which no interpretation made a difference on these prompts.
        undecided: factors for which some interpretation's difference from the best is unclear on
            these prompts.
        overrides: all of ``draft.overrides`` to build with; empty if none is needed.
        floor: the bundle's ``speculation.acceptance_floor``.
        prompts: where the prompts come from.
        baseline: what the answers' token frequencies alone predict.
    """

    bundle: str
    num_prompts: int
    num_tokens: int
    num_steps: int
    interpretations: tuple[RankedInterpretation, ...]
    best: Interpretation
    silent: tuple[str, ...]
    undecided: tuple[str, ...]
    overrides: Mapping[str, Any]
    floor: float
    baseline: Baseline
    prompts: PromptsOrigin

    @property
    def fits(self) -> bool:
        """Whether the best interpretation predicts as well as a correctly read draft: its first
        proposals reach ``floor``, and all tokens beat their frequencies.
        """
        return self._first_accepted >= self.floor and not self._worse_than_frequencies

    @property
    def finding(self) -> ProbeFinding:
        """What was found."""
        if self.fits:
            return "right" if self.manifest_is_best else "better"
        chance = self._first_accepted < self.floor and self.baseline.is_chance(self._first_accepted)
        return "another target" if chance else "prompts"

    @property
    def _worse_than_frequencies(self) -> bool:
        found = self._best_ranked.cross_entropy
        known = self.num_tokens >= _MIN_TOKENS
        return known and found >= max(self.baseline.entropy, _MIN_DIVERGENCE)

    @property
    def _best_ranked(self) -> RankedInterpretation:
        return next(r for r in self.interpretations if r.interpretation == self.best)

    @property
    def _first_accepted(self) -> float:
        return self._best_ranked.position_0

    @property
    def manifest_is_best(self) -> bool:
        """Whether the manifest in use is the best interpretation."""
        return not self.best.changes

    @property
    def override_lines(self) -> str:
        """YAML to paste into the build config; empty if the manifest in use is the best."""
        if self.manifest_is_best:
            return ""
        lines: str = yaml.safe_dump(
            {"draft": {"overrides": dict(self.overrides)}}, default_flow_style=None
        )
        return lines

    @property
    def _misfit(self) -> str:
        right = f"the best is right about {100 * self._first_accepted:.1f} % of first tokens"
        if self._first_accepted < self.floor:
            return f"{right}, less than speculation.acceptance_floor {self.floor:g}"
        return (
            f"{right}, but predicts the answers worse ({self._best_ranked.cross_entropy:.2f} nats) "
            f"than their own token frequencies do ({self.baseline.entropy:.2f} nats)"
        )

    @property
    def exit_code(self) -> int:
        """0: the manifest in use is the best; 1: another is better; 4: nothing fits."""
        return self._error.exit_code if self._error else 0

    @property
    def _error(self) -> CheckFailedError | None:
        if not self.fits:
            return NothingFitsError(
                f"{self.bundle}: no interpretation of the draft fits: {self._misfit}"
            )
        if not self.manifest_is_best:
            return CheckFailedError(
                f"{self.bundle}: the draft fits better with {interpretation_text(self.best)}"
            )
        return None

    def check(self) -> None:
        """Raise if the manifest in use is not the best interpretation, or if none fits.

        Raises:
            CheckFailedError: names the better interpretation, or the share of right first tokens.
        """
        if self._error:
            raise self._error

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "bundle": self.bundle,
            "prompts": self.prompts,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "manifest_is_best": self.manifest_is_best,
            "fits": self.fits,
            "finding": self.finding,
            "chance": self.baseline.top_share,
            "changes": _plain(dict(self.best.changes)),
            "overrides": dict(self.overrides),
            "override_lines": self.override_lines,
            "silent": list(self.silent),
            "undecided": list(self.undecided),
            "interpretations": [_interpretation_to_dict(r) for r in self.interpretations],
        }

    @property
    def title(self) -> str:
        """What was scored."""
        return (
            f"{self.bundle}: {self.num_tokens} answer tokens of {self.num_prompts} prompts, "
            f"{self.num_steps} steps"
        )

    def table(self) -> TextTable:
        """Return a table of the best ``_MAX_ROWS`` interpretations, and the manifest in use."""
        names = ("nats", "difference", "first accepted", "acceptance length")
        table = TextTable(*names, "against the manifest", "interpretation", right=len(names))
        for rank, r in enumerate(self.interpretations):
            changed = bool(r.interpretation.changes)
            if rank >= _MAX_ROWS and changed:
                continue
            table.add_row(
                f"{r.cross_entropy:.4f}",
                f"{r.contrast.difference:+.4f} \u00b1 {r.contrast.standard_error:.4f}"
                if changed
                else "",
                f"{100 * r.position_0:.1f} %",
                f"{r.acceptance_length:.2f}",
                r.contrast.standing if changed else "",
                interpretation_text(r.interpretation),
                style="bold" if r.interpretation == self.best else "",
            )
        return table

    def conclusion_lines(self) -> list[str]:
        """Return the conclusions, one per line."""
        lines = [f"{len(self.interpretations)} interpretations scored; --json lists them all"]
        lines += (
            [f"no difference on these prompts: {', '.join(self.silent)}"] if self.silent else []
        )
        lines += (
            [f"undecided on these prompts: {', '.join(self.undecided)}"] if self.undecided else []
        )
        if not self.fits:
            lines.append(
                f"no interpretation fits: {self._misfit}. Guessing the most frequent token is "
                f"right about {100 * self.baseline.top_share:.1f} %"
            )
        elif self.manifest_is_best:
            lines.append("no interpretation is significantly better than the manifest in use")
        else:
            lines += [
                f"a better interpretation: {interpretation_text(self.best)}. In the build config:",
                self.override_lines,
            ]
        lines += [GENERIC_NOTE] if self.prompts == "generic" else []
        if self.finding in _ADVICE:
            lines.append(_ADVICE[self.finding])
        return [*lines, _CLOSING_LINES[self.finding]]


def interpretation_text(interpretation: Interpretation) -> str:
    """Describe an interpretation in one line."""
    changes = [
        f"{field}={_plain(value)}"
        for field, value in interpretation.changes
        if field != "rope.sections"
    ]
    return ", ".join(changes) or "the manifest in use"


def make_report(
    found: SearchResult,
    manifest: DraftManifest,
    spec: TargetSpec,
    *,
    bundle: str,
    num_prompts: int,
    num_steps: int,
    overrides: Mapping[str, Any],
    floor: float,
    baseline: Baseline,
    prompts: PromptsOrigin = "file",
) -> ProbeReport:
    """Rank the scores of ``found``.

    Args:
        overrides: ``draft.overrides`` that the bundle was built with.
        floor: ``speculation.acceptance_floor`` that the bundle was built with.
    """
    base = found.scores[Interpretation()]
    standings = _standings(found, manifest, spec)
    # what is not significantly better than the manifest does not stand above it
    ranked = sorted(
        found.scores.items(),
        key=lambda item: (
            contrast(item[1], base).standing != "better" and item[0].changes != (),
            contrast(item[1], base).standing != "better",
            item[1].cross_entropy,
        ),
    )
    interpretations = tuple(
        RankedInterpretation(
            r, s.cross_entropy, s.position_0, s.acceptance_length, contrast(s, base)
        )
        for r, s in ranked
    )
    return ProbeReport(
        bundle=bundle,
        num_prompts=num_prompts,
        num_tokens=len(base.token_ce),
        num_steps=num_steps,
        interpretations=interpretations,
        best=found.best,
        silent=tuple(name for name, several in standings.items() if several == {"no difference"}),
        undecided=tuple(name for name, several in standings.items() if "unclear" in several),
        overrides={**overrides, **_overrides(found.best, manifest)} if found.best.changes else {},
        floor=floor,
        baseline=baseline,
        prompts=prompts,
    )


def _standings(
    found: SearchResult, manifest: DraftManifest, spec: TargetSpec
) -> dict[str, set[Standing]]:
    """Return by factor how its other values compare with the best interpretation, if scored."""
    best = found.scores[found.best]
    standings: dict[str, set[Standing]] = {}
    for name, changes in alternatives(manifest, spec).items():
        others = {found.best.changed(change, manifest) for change in changes} - {found.best}
        standings[name] = {
            contrast(found.scores[r], best).standing for r in others if r in found.scores
        }
    return standings


def _overrides(interpretation: Interpretation, manifest: DraftManifest) -> dict[str, Any]:
    """Return the interpretation as ``draft.overrides``; a rope is given whole."""
    changes = dict(interpretation.changes)
    fields = {
        field: _plain(value) for field, value in changes.items() if not field.startswith("rope.")
    }
    if len(fields) < len(changes):
        fields["rope"] = _rope_override(interpretation.apply(manifest).rope)
    return fields


def _rope_override(rope: RopeSpec) -> dict[str, Any]:
    sections = {"sections": list(rope.sections)} if rope.sections else {}
    return {
        "layout": rope.layout,
        **sections,
        "kind": rope.kind,
        "base": rope.base,
        **rope.parameters,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return vars(value) if is_dataclass(value) else value


def _interpretation_to_dict(ranked: RankedInterpretation) -> dict[str, Any]:
    return {
        "changes": _plain(dict(ranked.interpretation.changes)),
        "cross_entropy": ranked.cross_entropy,
        "position_0": ranked.position_0,
        "acceptance_length": ranked.acceptance_length,
        "difference": ranked.contrast.difference,
        "standard_error": ranked.contrast.standard_error,
        "standing": ranked.contrast.standing,
    }
