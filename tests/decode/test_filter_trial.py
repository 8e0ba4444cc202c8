"""Drafts are kept to a grammar where it forbids many of them, while that makes answers faster."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.sampling import filter_trial
from trt_eagle3.decode.sampling.filter_trial import FilterTrial


def run(trial: FilterTrial, trees: int, *, forbidden: float, as_is: int, kept: int) -> list[bool]:
    """Which of ``trees`` trees are kept to the grammar.

    ``forbidden``: share of the others' tokens that it forbids. ``as_is``, ``kept``: tokens that a
    tree emits.
    """
    found = []
    for _ in range(trees):
        found.append(trial.filters)
        filtered = trial.filters
        trial.add(0.0 if filtered else forbidden, kept if filtered else as_is, filtered=filtered)
    return found


def test_draft_of_few_forbidden_tokens_is_never_kept() -> None:
    assert not any(run(FilterTrial(), 400, forbidden=0.05, as_is=3, kept=4))


@pytest.mark.parametrize("kept", [2, 4])
def test_draft_is_kept_only_while_trees_emit_more(kept: int) -> None:
    few, rest = filter_trial._TREES, filter_trial._REST
    found = run(FilterTrial(), 2 * few + rest, forbidden=0.9, as_is=2, kept=kept)
    assert found[:few] == [False] * few
    assert found[few : 2 * few] == [True] * few
    assert found[2 * few :] == [kept > 2] * rest


def test_trial_is_repeated_after_a_rest() -> None:
    few, rest = filter_trial._TREES, filter_trial._REST
    trial = FilterTrial()
    run(trial, 2 * few + rest, forbidden=0.9, as_is=1, kept=4)
    assert not any(run(trial, few + rest, forbidden=0.0, as_is=4, kept=4))


def test_trial_in_a_batch_that_keeps_no_draft_stays_wanted() -> None:
    """One sequence of many wants it, and its drafts are not kept."""
    trial = FilterTrial()
    for _ in range(50):
        trial.add(0.9, 1, filtered=False)
    assert trial.filters
