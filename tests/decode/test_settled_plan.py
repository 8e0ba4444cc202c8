"""A plan by live cost that decodes plainly launches what a server without speculation launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.decode.pair import NUM_PAGES, PAGE_SIZE
from tests.decode.scheduling import MAX_SEQ_LEN, make_scheduler, pair, prompts
from tests.decode.simulated_load import h200_ms
from tests.decode.simulated_plan import primed
from trt_eagle3.decode import adaptive_plan
from trt_eagle3.decode.adaptive_plan import AdaptivePlan
from trt_eagle3.decode.kv_cache import PagePool
from trt_eagle3.decode.plan import Plan, TreePlan

_STEPS = 20  # one of them thinks again


class _Launches(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launched(plan: TreePlan, count: int) -> tuple[Counter[str], set[bool]]:
    """Operations of some plain steps of ``count`` sequences, and whether the next forward ran
    already behind each.
    """
    pool = PagePool(NUM_PAGES, PAGE_SIZE, table_len=MAX_SEQ_LEN // PAGE_SIZE)
    scheduler = make_scheduler(pool, None, plan.tree_for, chunk=64, observer=plan)
    for _ in range(count):
        scheduler.add(pair().sequence(prompts()[2], pool, drafting=True))
    while scheduler.waiting or any(not s.prefilled for s in scheduler.running):
        scheduler.step()
    cycles, ahead = scheduler._decoder.async_cycles, set[bool]()
    assert cycles is not None
    scheduler.step()
    with _Launches() as found:
        for _ in range(_STEPS):
            scheduler.step()
            ahead.add(cycles.only_plain)
    assert scheduler.num_draft_tokens == 0
    return found.counts, ahead


@pytest.mark.parametrize("count", [1, 3])
def test_plan_that_settled_on_plain_cycles_launches_nothing_more(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_plan, "_LOSS_ADVANCE", 0.0)  # it earns its first trial
    counts, ahead = launched(primed(h200_ms), count)
    plainly, plainly_ahead = launched(Plan({1: None}), count)
    assert counts == plainly
    assert ahead == plainly_ahead == {True}
    assert sum(counts.values()) > 10 * _STEPS


def test_plan_that_launches_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_plan, "_LOSS_ADVANCE", 0.0)
    observe = AdaptivePlan.observe

    def busy(self: AdaptivePlan, cycle: Any) -> None:
        torch.zeros(1)
        observe(self, cycle)

    monkeypatch.setattr(AdaptivePlan, "observe", busy)
    assert launched(primed(h200_ms), 1) != launched(Plan({1: None}), 1)
