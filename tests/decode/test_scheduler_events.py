"""The scheduler under any sequence of events: no page lost or written by two, and every answer
as if it were alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import (
    LAYOUTS,
    MAX_TOKENS,
    TREES,
    make_scheduler,
    pair,
    prompts,
    solo,
)
from trt_eagle3.decode.memory.kv_cache import PagePool
from trt_eagle3.decode.memory.prefix_cache import PrefixCache
from trt_eagle3.decode.memory.sequence import SequenceState
from trt_eagle3.decode.schedule.emission import Emission
from trt_eagle3.decode.step.decoder import AnyTree


@dataclass(eq=False)
class Asked:
    index: int
    sequence: SequenceState
    limit: int
    output_ids: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Requests come and go, readers stall, pages run out."""

    @initialize(cached=st.booleans())
    def begin(self, cached: bool) -> None:
        for index in range(len(LAYOUTS)):
            solo(index)  # before this scheduler's caches are bound
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.prefixes = PrefixCache(self.pool) if cached else None
        self.tree: AnyTree | None = None
        self.scheduler = make_scheduler(self.pool, self.prefixes, lambda _: self.tree)
        self.asked: list[Asked] = []
        self.held: list[int] = []

    @rule(
        index=st.integers(0, len(LAYOUTS) - 1),
        drafting=st.booleans(),
        limit=st.integers(1, MAX_TOKENS),
    )
    def submit(self, index: int, drafting: bool, limit: int) -> None:
        sequence = pair().sequence(prompts()[index], self.pool, drafting=drafting)
        self.asked.append(Asked(index, sequence, limit))
        self.scheduler.add(sequence)

    @rule(tree=st.sampled_from(sorted(TREES)), times=st.integers(1, 4))
    def step(self, tree: str, times: int) -> None:
        self.tree = TREES[tree]
        for _ in range(times):
            for emission in self.scheduler.step():
                self.take(emission)

    def take(self, emission: Emission) -> None:
        asked = next(a for a in self.asked if a.sequence is emission.sequence)
        assert emission.error is None
        assert asked.sequence.backpressured is False
        asked.output_ids += emission.tokens
        if len(asked.output_ids) >= asked.limit or emission.full:
            expected = solo(asked.index)
            assert asked.output_ids[: asked.limit] == expected[: asked.limit]
            self.scheduler.remove(asked.sequence)
            self.asked.remove(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        self.scheduler.remove(asked.sequence)
        self.asked.remove(asked)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), backpressured=st.booleans())
    def stall(self, data: Any, backpressured: bool) -> None:
        data.draw(st.sampled_from(self.asked)).sequence.backpressured = backpressured

    @rule(count=st.integers(1, 20))
    def press(self, count: int) -> None:
        self.held += self.pool.take(min(count, self.pool.num_free))

    @rule()
    def relax(self) -> None:
        self.pool.give_back(self.held)
        self.held = []

    @invariant()
    def pages_are_owned_by_those_who_say_so(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners = Counter(self.held)
        for asked in self.asked:
            owners.update(asked.sequence.pages.held)
        if self.prefixes is not None:
            kept = self.prefixes._pages.values()
            owners.update(kept)
            assert self.prefixes.num_idle == sum(owners[page] == 1 for page in kept)
        every = range(1, NUM_PAGES)
        assert {page: self.pool.owners(page) for page in every} == {
            page: owners[page] for page in every
        }
        assert sorted(self.pool._free) == [page for page in every if not owners[page]]

    @invariant()
    def nobody_writes_into_a_page_of_others(self) -> None:
        for asked in getattr(self, "asked", []):
            s = asked.sequence
            own = s.pages.held[s.num_computed_tokens // PAGE_SIZE :]
            assert all(self.pool.owners(page) == 1 for page in own)

    @invariant()
    def draft_holds_as_many_rows_as_the_target_or_knows_what_it_lacks(self) -> None:
        for asked in getattr(self, "asked", []):
            s = asked.sequence
            if s.drafting:
                assert s.num_draft_computed_tokens + len(s.deferred) == s.num_computed_tokens
            assert s.draft is None or s.num_draft_computed_tokens
            if s not in self.scheduler.running:
                assert (s.num_computed_tokens, len(s.pages.held), s.draft) == (0, 0, None)

    def teardown(self) -> None:
        """Without pressure everybody gets an answer, and every page comes back."""
        if not hasattr(self, "pool"):
            return
        self.relax()
        for asked in self.asked:
            asked.sequence.backpressured = False
        for _ in range(60 * (1 + len(self.asked))):
            if self.asked:
                self.step("bushy", 1)
        assert self.asked == []
        if self.prefixes is not None:
            self.prefixes.clear()
        assert self.pool.num_free == NUM_PAGES - 1


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestMachine = Machine.TestCase
