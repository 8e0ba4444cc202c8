"""Following: whether the draft is to run over a prompt, so that it can draft for whoever sent it.

That takes time beside every prompt, and wins something only where a tree is drafted later on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_eagle3.decode.acceptance_rate import AcceptanceRates
from trt_eagle3.decode.cycle_cost import BATCHES, CycleCosts, batch_bucket
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.loss_account import LossAccount
from trt_eagle3.decode.outlook import LEAST_GAIN, best_rates, rates_of_all
from trt_eagle3.decode.plan import Cycle
from trt_eagle3.decode.width import DecodingBatch, Width

__all__ = ["Following"]

_HOPE_SHARE = 0.005  # of the time that following may take while nothing is drafted
_HOPE_ADVANCE = 12.0  # plain cycles of it, before any time has gone by
_MOST_HOPE = 12.0  # plain cycles at once
_RECENT = 512  # cycles of those whom the draft follows, since it drafted a tree for as many
_LASTS = 32  # cycles for which it is not reckoned anew: that takes as long as a few launches


@dataclass(frozen=True)
class _Outlook:
    """Whether following gains by what is expected, and whether it may at best."""

    gains: bool
    may_gain: bool


class Following:
    """What following is hoped to win, and what it has taken while nothing was drafted."""

    def __init__(
        self,
        costs: CycleCosts,
        load: LoadCosts,
        acceptance: AcceptanceRates,
        widths: Sequence[Width],
    ) -> None:
        """What the plan knows and learns; ``widths``: that it chooses from, plain decoding
        first.
        """
        self._costs = costs
        self._load = load
        self._acceptance = acceptance
        self._widths = widths
        self._hopes = LossAccount(_HOPE_SHARE, _HOPE_ADVANCE, _MOST_HOPE)
        self._outlooks: dict[int, _Outlook] = {}  # by bucket of the batch size
        self._cycles = 0
        self._since_tree = dict.fromkeys(BATCHES, 0)  # cycles of half as many sequences, or more
        self._has_drafted = False

    def pays(self, batch: DecodingBatch) -> bool:
        """Whether some width is expected to gain, if the draft follows all of ``batch`` and the
        prompts that come, and trees are drafted; before the first one, where a width may gain at
        best. Later hope is not free: what it takes must be borne.
        """
        bucket = batch_bucket(batch.size)
        if bucket not in self._outlooks:
            self._outlooks[bucket] = self._reckon(batch)
        found = self._outlooks[bucket]
        is_due = found.gains or (found.may_gain and not self._has_drafted)
        if is_due and self._since_tree[bucket] < _RECENT:
            return True
        return found.may_gain and self._bears_hope(batch)

    def settle(self, cycle: Cycle, batch: DecodingBatch) -> None:
        """Count what following took beside ``cycle`` of ``batch``; a tree's pays for it."""
        self._cycles += 1
        self._has_drafted |= cycle.tree is not None
        for size in BATCHES if batch.drafting else ():
            if size <= 2 * batch.size:
                self._since_tree[size] = 0 if cycle.tree else self._since_tree[size] + 1
        if self._cycles % _LASTS == 0:
            self._outlooks.clear()
        if not self._costs.is_timed or not batch.size:
            return
        alone, unit = self._plain_cycles(batch), self._costs.one_seconds
        following = cycle.following / unit if cycle.tree is None else 0.0
        self._hopes.settle(alone + following, alone, alone)

    def _reckon(self, batch: DecodingBatch) -> _Outlook:
        # those that wait have no rows yet
        context = sum(s.num_prefill for s in batch.sequences) / max(batch.size, 1)
        rates = rates_of_all(self._load, self._acceptance, self._widths, batch.size, context)
        best = best_rates(self._load, self._acceptance, self._widths, batch, rates)
        return _Outlook(gains=self._gains(batch, rates), may_gain=self._gains(batch, best))

    def _gains(self, batch: DecodingBatch, rates: Sequence[float]) -> bool:
        return self._load.followed(self._widths[0].shape(batch), max(rates[1:])) >= LEAST_GAIN

    def _bears_hope(self, batch: DecodingBatch) -> bool:
        return self._hopes.balance(self._plain_cycles(batch)) > 0.0

    def _plain_cycles(self, batch: DecodingBatch) -> float:
        """What a plain cycle of ``batch`` takes, in such cycles of one sequence."""
        return self._costs.seconds(self._widths[0].shape(batch)) / self._costs.one_seconds
