"""When drafts are kept to a grammar: only where it forbids many, and only while answers gain."""

from __future__ import annotations

import pytest

from trt_eagle3.decode.sampling import filter_trial
from trt_eagle3.decode.sampling.filter_trial import FilterTrial


def run(trial: FilterTrial, trees: int, *, forbidden: float, as_is: int, kept: int) -> list[bool]:
    """Which of ``trees`` are kept to the grammar, of which it forbids ``forbidden`` otherwise;
    tokens of each kind.
    """
    found = []
    for _ in range(trees):
        found.append(trial.wanted)
        filtered = trial.wanted
        trial.add(0.0 if filtered else forbidden, kept if filtered else as_is, filtered=filtered)
    return found


def test_draft_that_follows_the_target_is_never_kept() -> None:
    assert not any(run(FilterTrial(), 400, forbidden=0.05, as_is=3, kept=4))


@pytest.mark.parametrize("kept", [2, 4])
def test_draft_is_kept_only_while_answers_gain(kept: int) -> None:
    few, rest = filter_trial._TREES, filter_trial._REST
    found = run(FilterTrial(), 2 * few + rest, forbidden=0.9, as_is=2, kept=kept)
    assert found[:few] == [False] * few
    assert found[few : 2 * few] == [True] * few
    assert found[2 * few :] == [kept > 2] * rest


def test_what_was_found_is_looked_at_again() -> None:
    few, rest = filter_trial._TREES, filter_trial._REST
    trial = FilterTrial()
    run(trial, 2 * few + rest, forbidden=0.9, as_is=1, kept=4)
    assert not any(run(trial, few + rest, forbidden=0.0, as_is=4, kept=4))


def test_batch_that_keeps_no_draft_goes_on_as_it_is() -> None:
    """One of many wants it, and does not get it."""
    trial = FilterTrial()
    for _ in range(50):
        trial.add(0.9, 1, filtered=False)
    assert trial.wanted
