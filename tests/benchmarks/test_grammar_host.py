"""The benchmark of masks measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.grammar_host import DraftedTrees
from tests.decode.structured import TREES, state_of
from trt_eagle3.decode.sampling.grammar import Grammar

DIGITS = Grammar.regex("[0-9]{200}")


@pytest.mark.parametrize(("share", "fewest"), [(0.0, 3), (1.0, 3 * 8)])
def test_trees_have_as_many_masks_as_the_share_of_allowed_drafts_says(
    share: float, fewest: int
) -> None:
    parents = TREES["tree"].parents
    trees = DraftedTrees(lambda: state_of(DIGITS), parents, 3, share)
    masks, *seconds = trees.measure(3)
    assert fewest <= masks <= fewest + 3  # a token that is drawn from all may be a digit
    assert min(seconds) > 0
