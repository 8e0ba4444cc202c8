"""The registry of checks: which run, which are skipped or do not apply, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trt_eagle3.parity.checks.check_recorder import Check, CheckRecorder, Measurements, Status
from trt_eagle3.parity.checks.registry import CHECKS, run_check
from trt_eagle3.parity.checks.thresholds import THRESHOLDS, Thresholds


def _one_too_large(_: Any, m: Measurements) -> None:
    m.add(2 * m.limit.value, "a", "x", compared=1)


def added(**options: Any) -> Measurements:
    """A check of its own: one line beside those of the registry."""
    check = Check("draft.added", "draft", "an addition", "layer_step", _one_too_large, **options)
    return CheckRecorder([*CHECKS.values(), check], Thresholds("float32"))["draft.added"]


def evidence(*, pytorch: bool = True, draft: bool = True) -> Any:
    return SimpleNamespace(pytorch=object() if pytorch else None, manifest=draft or None)


def test_added_check_runs_by_its_own_threshold() -> None:
    m = added()
    run_check(evidence(), m)
    assert [found.value for found in m.failures] == [4e-5]
    assert (m.status, m.reason) == ("failed", "")


@pytest.mark.parametrize(
    ("options", "given", "left_out", "status", "reason"),
    [
        ({}, {}, ("draft.added",), "skipped", "left out"),
        (
            {"needs_draft": True},
            {"draft": False},
            (),
            "not_applicable",
            "a bundle without a draft",
        ),
        ({"needs_pytorch": True}, {"pytorch": False}, (), "skipped", "only against PyTorch"),
        ({"needs_pytorch": False}, {"pytorch": False}, (), "failed", ""),
        ({"lacks": lambda _: "no ear"}, {}, (), "not_applicable", "no ear"),
        ({"lacks": lambda _: ""}, {}, (), "failed", ""),
    ],
)
def test_check_without_what_it_needs_measures_nothing_and_has_the_reason(
    options: dict[str, Any],
    given: dict[str, bool],
    left_out: tuple[str, ...],
    status: Status,
    reason: str,
) -> None:
    m = added(**options)
    run_check(evidence(**given), m, left_out)
    assert (m.status, m.reason, bool(m.taken)) == (status, reason, not reason)


def test_every_check_has_its_own_function_and_a_known_threshold() -> None:
    functions = [check.function for check in CHECKS.values()]
    assert len(set(functions)) == len(CHECKS) == 49
    assert {check.threshold for check in CHECKS.values()} <= THRESHOLDS.keys()
