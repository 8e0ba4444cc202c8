"""Whether the draft follows prompts: by what it was seen to win, or for a while on hope."""

from __future__ import annotations

import pytest

from tests.decode.simulated_load import Sequence
from tests.decode.simulated_plan import CHAIN
from trt_eagle3.decode.acceptance_rate import AcceptanceRates, levels_of
from trt_eagle3.decode.cycle_cost import CycleCosts, prior_of
from trt_eagle3.decode.following import Following
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.plan import Cycle, shrunk
from trt_eagle3.decode.width import DecodingBatch, Width

PLAIN_S = 0.005  # of 8 sequences, and of one
TREE = shrunk(CHAIN, 3)
LEVELS = levels_of(TREE)
SEQUENCES = [Sequence(100, 0.5) for _ in range(8)]
BATCH = DecodingBatch(SEQUENCES)  # type: ignore[arg-type]


class Followed:
    """One over a chain of 2 that takes ``tree_s``; its draft is right as ``acceptance`` has it."""

    def __init__(self, tree_s: float, kv_share: float = 0.0) -> None:
        costs = CycleCosts(prior_of(None, kv_share))
        for size in (1, 8):
            costs.prime(1, size, PLAIN_S)
            costs.prime(3, size, tree_s)
        self.acceptance = AcceptanceRates({})
        self.load = LoadCosts(costs)
        widths = [Width(None, ()), Width(TREE, LEVELS)]
        self.following = Following(costs, self.load, self.acceptance, widths)

    def see(self, accepted: int, count: int = 100) -> Followed:
        for _ in range(count):
            self.acceptance.observe(LEVELS, [accepted])
        return self

    def run(
        self,
        cycles: int,
        seconds: float = 0.0,
        *,
        drafted: bool = False,
        drafting: bool = True,
        joining: int = 0,
        size: int = 8,
    ) -> Followed:
        """Cycles of ``size`` beside each of which following takes ``seconds``; ``drafting``:
        whether the draft follows any sequence of them. ``joining``: as of ``Cycle``.
        """
        tree, accepted = (TREE, 0) if drafted else (None, None)
        sequences = [Sequence(100, 0.5, drafting=drafting) for _ in range(size)]
        for _ in range(cycles):
            cycle = Cycle(sequences, tree, size * [accepted], 0, None, joining, seconds)  # type: ignore[arg-type]
            self.load.observe(cycle)
            self.following.settle(cycle, DecodingBatch(sequences))  # type: ignore[arg-type]
        return self

    @property
    def pays(self) -> bool:
        return self.following.pays(BATCH)


def test_draft_that_pays_is_followed_whatever_that_took_while_trees_are_drafted() -> None:
    found = Followed(0.006).see(accepted=2).run(1, drafted=True)
    assert found.pays
    assert found.run(100, PLAIN_S).pays
    assert found.run(600, drafting=False).pays, "no tree could be drafted for them"
    assert not found.run(500, PLAIN_S).pays, "no tree for long: it is hope, which has taken enough"


def test_draft_that_pays_is_not_followed_for_ever_where_no_tree_comes_of_it() -> None:
    """What was seen of it fades meanwhile: that is no reason to begin anew."""
    found = Followed(0.006).see(accepted=2, count=3).run(1, drafted=True)
    assert found.run(500, PLAIN_S).pays
    found.run(20, PLAIN_S).acceptance.fade(1.0)
    assert not found.run(1).pays


def test_trees_of_few_sequences_say_nothing_of_many() -> None:
    """As where a crowd goes home, and the next one comes."""
    found = Followed(0.006).see(accepted=2).run(1, drafted=True).run(520, PLAIN_S)
    assert not found.pays
    assert not found.run(20, drafted=True, size=3).pays
    assert found.run(1, drafted=True, size=4).pays


def test_those_that_wait_count_with_the_rows_that_they_will_have() -> None:
    """Over long contexts a plain step takes so long that the same tree gains."""

    class Waiting(Sequence):
        num_prefill = 1000

    found = Followed(0.016, kv_share=5e-4).see(accepted=2)
    wait, begin = ([kind(100, 0.5, length=0) for _ in range(8)] for kind in (Waiting, Sequence))
    assert found.following.pays(DecodingBatch(wait))  # type: ignore[arg-type]
    found = Followed(0.016, kv_share=5e-4).see(accepted=2)
    assert not found.following.pays(DecodingBatch(begin))  # type: ignore[arg-type]


def test_draft_that_cannot_pay_is_not_followed() -> None:
    assert not Followed(0.016).pays
    assert not Followed(0.006).see(accepted=0).pays


def test_draft_that_was_never_tried_is_followed_for_long_if_it_may_pay() -> None:
    assert Followed(0.009).pays
    assert Followed(0.009).run(500, PLAIN_S).pays
    assert not Followed(0.009).run(520, PLAIN_S).pays


def hoped_for() -> Followed:
    """Right in one of ten trees: it would have to be better than that."""
    found = Followed(0.0061).see(accepted=1, count=2).see(accepted=0, count=18)
    return found.run(1, drafted=True)


def test_draft_that_may_be_better_than_seen_is_followed_while_time_bears_it() -> None:
    assert hoped_for().pays
    assert hoped_for().run(11, PLAIN_S).pays, "twelve plain cycles are advanced"
    assert not hoped_for().run(13, PLAIN_S).pays
    waited = hoped_for().run(13, PLAIN_S).run(3000)
    assert waited.pays
    assert not waited.run(13, PLAIN_S).pays, "no more than twelve are saved up"


def test_trees_pay_for_what_following_takes_beside_them() -> None:
    assert hoped_for().run(20, PLAIN_S, drafted=True).pays


def test_prompts_that_come_often_make_following_dear() -> None:
    """A draft 1.33 times as fast, beside prompts of which each takes half a plain cycle."""
    found = Followed(0.0075).see(accepted=1)
    assert found.pays
    assert not found.run(600, PLAIN_S / 2, joining=1).pays


@pytest.mark.parametrize("cycles", [0, 50])
def test_nothing_is_counted_before_costs_are_in_seconds(cycles: int) -> None:
    found = hoped_for()
    costs = CycleCosts(prior_of(None, 0.0))
    untimed = Following(costs, LoadCosts(costs), found.acceptance, found.following._widths)
    for _ in range(cycles):
        untimed.settle(Cycle(SEQUENCES, None, 8 * [None], 0, None, 1, 1.0), BATCH)  # type: ignore[arg-type]
    assert untimed.pays(BATCH)
