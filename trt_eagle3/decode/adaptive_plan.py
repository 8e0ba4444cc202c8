"""AdaptivePlan: the tree of the next cycle by what cycles cost here and now, and by how often the
draft is right.

Of every width the expected speed over plain decoding is reckoned: what plain steps would cost that
emit as many tokens, as cheap as the prompts beside them make them (``LoadCosts``), over the time of
a cycle. A width that may yet lose against plain decoding is chosen only while a ``LossAccount``
bears its next cycles. What was never tried, or long ago, is tried for a few cycles where it could
win, as long as all trials together lose no more than ``_TRIAL_SHARE`` of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trt_eagle3.config import SpeculationConfig
from trt_eagle3.decode.acceptance_rate import AcceptanceRates, Level, SequenceRates, levels_of
from trt_eagle3.decode.cycle_cost import CostPrior, CycleCosts, batch_bucket
from trt_eagle3.decode.decoder import AnyTree
from trt_eagle3.decode.device_batch import LAUNCHED_AHEAD
from trt_eagle3.decode.following import Following
from trt_eagle3.decode.load_cost import LoadCosts
from trt_eagle3.decode.loss_account import LossAccount
from trt_eagle3.decode.outlook import LEAST_GAIN, best_rates, most_seconds, rates_of_all
from trt_eagle3.decode.plan import Cycle, Plan, shrunk
from trt_eagle3.decode.sequence import SequenceState
from trt_eagle3.decode.switch_cost import SwitchCosts
from trt_eagle3.decode.trial import TRIAL_CYCLES, Trial
from trt_eagle3.decode.width import DecodingBatch, Width

__all__ = ["AdaptivePlan"]

_DECIDE_EVERY = 16  # cycles
_GAIN_OF_LESS = 1.01  # what a narrower one must
_HORIZON = 128  # cycles over which a switch must have paid
_LOSS_SHARE = 0.0165  # of the time that may be lost against plain decoding
_LOSS_ADVANCE = 1.0  # plain cycles of it, before any time has gone by
_MOST_LOSS = 12.0  # plain cycles at once
_TRIAL_SHARE = 0.005  # of the time that trials may lose against the width that is served
_TRIAL_ADVANCE = 1.0
_MOST_TRIAL_LOSS = 4.0
_FAR = 2.5  # times that an unknown width may be dearer that is not next to what is served
_STRANGE = 2.0  # times what is expected: the first run of a new shape
_LUCK = 0.5  # tokens that a chance of a draft may bring less than it should, times their root
_EVIDENCE = 6  # chances of a draft that say something of it
_FADED = 1e-3  # of what was seen of the draft is forgotten in a plain cycle
_EARLY = (1, 2, 4, 8)  # cycles of one width after which is thought again
_HICCUP = 3.0  # times what is expected: what took longer is no width's fault
_QUIET_AFTER = 32  # cycles without a timed one
_QUIET_EVERY = 8  # of so many cycles one may keep prompts waiting


class AdaptivePlan:
    """Chooses among the widths of one configured tree. Not thread-safe: the scheduler's own.

    A sampled sequence with a seed of its own gets the fixed plan's trees, and whoever decodes with
    it: which random numbers decide depends on the tree, and its answer must come again.
    """

    speculates = True

    def __init__(
        self,
        config: SpeculationConfig,
        fixed: Plan,
        num_nodes: Sequence[int],
        costs: CostPrior,
        acceptance: Mapping[Level, float],
    ) -> None:
        """Args:
        fixed: what counts where time must not. num_nodes: sizes to choose from, 1 first.
        costs, acceptance: priors, before anything was served.
        """
        trees = [shrunk(config, count) for count in num_nodes]
        self._candidates = [Width(tree, levels_of(tree)) for tree in trees]
        self._index = {c.tree: i for i, c in enumerate(self._candidates)}
        self._fixed = fixed
        self._costs = CycleCosts(costs)
        self._load = LoadCosts(self._costs)
        self._overall = AcceptanceRates(acceptance)
        self._own = SequenceRates(sorted({level for c in self._candidates for level in c.levels}))
        self._choices: dict[int, int] = {}  # by bucket of the batch size
        self._last: int | None = None  # candidate of the cycle before
        self._asked: AnyTree | None = None  # what was wanted last: it is launched in the same time
        self._cycles = self._alike = self._untimed = self._untaken = self._quiet = 0
        self._switches = SwitchCosts()
        self._trial: Trial | None = None
        self._account = LossAccount(_LOSS_SHARE, _LOSS_ADVANCE, _MOST_LOSS)
        self._trials = LossAccount(_TRIAL_SHARE, _TRIAL_ADVANCE, _MOST_TRIAL_LOSS)
        self._following = Following(self._costs, self._load, self._overall, self._candidates)

    @property
    def wants_quiet(self) -> bool:
        """Whether prompts wait for the next cycle: a trial is on, or none was timed for long."""
        if self._trial is not None:
            return self._trial.quiet
        return self._untimed >= _QUIET_AFTER and self._may_be_quiet

    @property
    def _may_be_quiet(self) -> bool:
        """Whether prompts have waited seldom enough to wait for another cycle."""
        return self._quiet * _QUIET_EVERY <= self._cycles

    def tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        """The tree for ``sequences``; asking changes nothing that matters."""
        self._asked = self._tree_for(sequences)
        return self._asked

    def _tree_for(self, sequences: Sequence[SequenceState]) -> AnyTree | None:
        if not any(s.drafting for s in sequences):
            return None
        if any(_is_seeded(s) for s in sequences):
            return self._fixed.tree_for(sequences)
        if self._trial is not None:
            return self._candidates[self._trial.candidate].tree
        bucket = batch_bucket(len(sequences))
        if bucket not in self._choices:
            batch = DecodingBatch(sequences)
            rates = self._rates(batch)
            best = self._best(batch, rates)
            self._choices[bucket] = best if rates[best] >= LEAST_GAIN * rates[0] else 0
        return self._candidates[self._choices[bucket]].tree

    def follows(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """Where that may pay. What was seen of the draft fades in plain cycles, until it may be
        better than that again: then it follows some of those that come, and a trial shows how often
        it is right.
        """
        return _is_seeded(sequence) or self._following.pays(DecodingBatch([*others, sequence]))

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """Every width, those first that promise most by what is known so far."""
        trees = [candidate.tree for candidate in self._candidates]
        rates = rates_of_all(self._load, self._overall, self._candidates, batch_size, 0.0)
        return [trees[i] for i in sorted(range(len(trees)), key=rates.__getitem__, reverse=True)]

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Know what a cycle of ``tree`` takes over short contexts."""
        index = self._index.get(tree)
        if index is not None:
            self._costs.prime(self._candidates[index].num_nodes, batch_size, seconds)

    def prime_catch_up(self, num_rows: int, seconds: float) -> None:
        """Know how long the draft takes to catch up with ``num_rows`` rows."""
        self._switches.prime_catch_up(num_rows, seconds)

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle, and now and then think again."""
        index, batch = self._index.get(cycle.tree), DecodingBatch(cycle.sequences)
        self._load.observe(cycle)
        self._following.settle(cycle, batch)
        if index is None or not batch.drafting:
            self._pass_over(cycle, batch, index)
            return
        self._cycles += 1
        self._quiet += self.wants_quiet
        self._learn_acceptance(cycle, index)
        shape = self._candidates[index].shape(batch)
        expected = self._costs.seconds(shape)
        self._settle(cycle, batch, index, expected)
        self._learn_cost(cycle, batch, index, expected)
        self._untaken = self._untaken + 1 if self._asked is not None and index == 0 else 0
        if self._untaken >= 2 * TRIAL_CYCLES:  # near the length limit nobody drafts
            self._choices[batch_bucket(batch.size)] = 0
        self._alike = self._alike + 1 if index == self._last else 1
        self._last = index
        if self._trial is not None:
            self._go_on_trying(batch, index)
        elif self._is_time_to_decide or not self._bears(batch, index):
            self._decide(batch, may_try=self._alike >= TRIAL_CYCLES)

    def _pass_over(self, cycle: Cycle, batch: DecodingBatch, index: int | None) -> None:
        """A cycle of the fixed plan's (``index`` None), or of nobody whom the draft follows."""
        if index is not None:
            self._overall.fade(_FADED)
            if index == self._last and cycle.seconds is not None:
                self._costs.observe(self._candidates[index].shape(batch), cycle.seconds)
        self._trial = None  # one of which nothing comes keeps no prompt waiting
        self._last, self._untimed = index, 0

    @property
    def _is_time_to_decide(self) -> bool:
        return self._alike in _EARLY or self._cycles % _DECIDE_EVERY == 0

    def reckoned_seconds(self, cycle: Cycle) -> float:
        """What ``cycle`` was expected to take, without what the draft caught up with."""
        candidate = self._candidates[self._index[cycle.tree]]
        return self._costs.seconds(candidate.shape(DecodingBatch(cycle.sequences)))

    def _learn_acceptance(self, cycle: Cycle, index: int) -> None:
        levels = self._candidates[index].levels
        if not levels:
            self._overall.fade(_FADED)
            return
        drafted = [
            (s, n) for s, n in zip(cycle.sequences, cycle.accepted, strict=True) if n is not None
        ]
        if drafted:
            sequences, accepted = zip(*drafted, strict=True)
            self._overall.observe(levels, accepted)
            self._own.observe(levels, sequences, accepted)

    def _learn_cost(self, cycle: Cycle, batch: DecodingBatch, index: int, expected: float) -> None:
        """Time counts where nothing else went on, neither what the draft had to catch up with nor
        the launch of another width; of a width that is unknown such a cycle says something, too.
        """
        self._untimed += 1
        if cycle.seconds is None or self._last is None:
            return
        shape, more = self._candidates[index].shape(batch), cycle.seconds - expected
        if index == self._last and self._asked == cycle.tree and not cycle.caught_up:
            self._untimed = 0
            self._costs.observe(shape, cycle.seconds)
        elif index and not self._costs.is_known(shape):
            late = self._switches.catch_up(cycle.caught_up, self._costs.one_seconds)
            seconds = max(cycle.seconds - late, expected / _STRANGE)
            if seconds < _HICCUP * expected:
                self._costs.observe(shape, min(seconds, _STRANGE * expected))
        elif cycle.caught_up:
            self._switches.observe_catch_up(cycle.caught_up, more, self._costs.one_seconds)
        elif index == 0 and self._last:
            self._switches.observe_turn(more, expected)

    def _settle(self, cycle: Cycle, batch: DecodingBatch, index: int, expected: float) -> None:
        """What the cycle has lost or won, against plain decoding and against what was served before
        a trial.
        """
        shape, unit = self._candidates[0].shape(batch), self._costs.one_seconds
        alone, worth = self._costs.seconds(shape), self._load.worth(cycle, shape)
        seconds = self._spent(cycle, index, expected if index else worth, alone)
        served = seconds if self._trial is None else worth / self._trial.rate
        self._account.settle(seconds / unit, worth / unit, alone / unit)
        self._trials.settle(seconds / unit, min(served, seconds) / unit, seconds / unit)

    def _spent(self, cycle: Cycle, index: int, expected: float, alone: float) -> float:
        """Seconds that the cycle took; of plain ones only what tells them from others is more than
        ``expected``. A capture comes once: it is nobody's fault. ``alone``: of a plain cycle.
        """
        usual = expected + self._switches.catch_up(cycle.caught_up, self._costs.one_seconds)
        turns = index == 0 and bool(self._last)  # what was launched ahead for a tree is for nothing
        if turns:
            usual += self._switches.turn(alone)
        if cycle.seconds is None or not self._costs.is_timed:
            return usual
        seconds = min(cycle.seconds, _HICCUP * usual)
        if index:
            return seconds
        return max(seconds, expected) if turns or cycle.caught_up else expected

    def _go_on_trying(self, batch: DecodingBatch, index: int) -> None:
        """Count a cycle of the trial; what it has shown decides in the end."""
        trial = self._trial
        assert trial is not None
        if trial.count(index) or not self._bears(batch, trial.candidate, quiet=trial.quiet):
            self._trial = None
            self._alike = TRIAL_CYCLES  # what is chosen now has some cycles before the next one
            self._decide(batch, may_try=False)

    def _decide(self, batch: DecodingBatch, *, may_try: bool) -> None:
        """Choose for as many sequences as decode now, and try what might be better."""
        rates = self._rates(batch)
        current = self._choices.get(batch_bucket(batch.size), 0)
        best = self._best(batch, rates)
        served = _HORIZON * self._load.seconds(self._candidates[best].shape(batch))
        pays = rates[best] * served / (served + self._catch_up_seconds(batch, best))
        wanted = LEAST_GAIN if best > current else _GAIN_OF_LESS
        better = pays > wanted * rates[current] or not self._bears(batch, current)
        chosen = best if better else current
        self._choices[batch_bucket(batch.size)] = chosen
        if may_try:
            self._try(batch, rates, chosen)

    def _best(self, batch: DecodingBatch, rates: Sequence[float]) -> int:
        """The candidate that promises most, of those whose losses could be borne."""
        borne = [i for i in range(len(rates)) if self._bears(batch, i)]
        return max(borne, key=rates.__getitem__)

    def _bears(self, batch: DecodingBatch, index: int, *, quiet: bool = False) -> bool:
        """Whether the next cycles of a candidate can be paid for, were the draft never right where
        it was not seen to be, and luck bad. ``quiet``: prompts wait: no plain step would ride.
        """
        if not index:
            return True
        candidate, drafting = self._candidates[index], len(batch.drafting)
        shape = self._candidates[0].shape(batch)
        alone = self._costs.seconds(shape)
        gain = self._overall.least_tokens(candidate.levels) - 1.0
        # the narrowest gathers evidence a few cycles at a time: of dear rows no more is borne
        wanted = _EVIDENCE - self._overall.tried(candidate.levels[0]) if index > 1 else 0.0
        # what is launched ahead runs before what was observed has changed anything
        lag = 2 if batch.size >= LAUNCHED_AHEAD else 1
        cycles = max(lag, wanted / max(drafting, 1))
        luck = _LUCK * (cycles * drafting) ** 0.5
        tokens = max(cycles * gain * drafting - luck, 0.0)
        steps = 1.0 + tokens / cycles / batch.size
        plain = alone * steps if quiet else self._load.instead(shape, steps)
        most = most_seconds(self._load, self._candidates, batch, index)
        needed = cycles * (most - plain) + self._switches.turn(alone)
        needed += 0.0 if self._last else self._catch_up_seconds(batch, index)
        unit = self._costs.one_seconds
        borne = self._account.balance(alone / unit) if self._costs.is_measured else 0.0
        return bool(needed / unit <= borne)

    def _rates(self, batch: DecodingBatch) -> list[float]:
        """Expected speed of every candidate, times that of plain decoding."""
        trees = [candidate.levels for candidate in self._candidates]
        tokens = self._own.expected_tokens(trees, batch.drafting, self._overall)
        more = [(count - len(batch.drafting)) / batch.size for count in tokens]
        return [
            self._load.speed(candidate.shape(batch), 1.0 + count)
            for candidate, count in zip(self._candidates, more, strict=True)
        ]

    def _catch_up_seconds(self, batch: DecodingBatch, wanted: int) -> float:
        """Time for the draft to catch up with what it was not asked for."""
        return self._switches.catch_up(batch.deferred, self._costs.one_seconds) if wanted else 0.0

    def _try(self, batch: DecodingBatch, rates: Sequence[float], current: int) -> None:
        """Begin a trial of what could be better by most, where its loss is paid for. What plain
        decoding costs must be known at any price but that of prompts that wait too often, without
        which nothing would be timed.
        """
        quiet = self._may_be_quiet
        is_timed = quiet or self._untimed == 0
        if current and is_timed and not self._load.is_known(self._candidates[0].shape(batch)):
            self._trial = Trial(0, rates[current], quiet)
            return
        widths = self._candidates
        hopes = dict(enumerate(best_rates(self._load, self._overall, widths, batch, rates)))
        del hopes[current]
        for i in sorted(hopes, key=hopes.__getitem__, reverse=True):
            if hopes[i] <= rates[current]:
                return
            loss = self._trial_loss(batch, rates, current, i)
            served = self._load.seconds(self._candidates[current].shape(batch))
            unit = self._costs.one_seconds
            # as long as little is known of the draft, the account of all losses is enough
            paid = self._is_new(i) or loss / unit <= self._trials.balance(served / unit)
            if paid and self._bears(batch, i, quiet=quiet):
                self._trial = Trial(i, rates[current], quiet)
                return

    def _is_new(self, index: int) -> bool:
        """Whether next to nothing was seen of a candidate's first level."""
        levels = self._candidates[index].levels
        return bool(levels) and self._overall.is_new(levels[0])

    def _trial_loss(
        self, batch: DecodingBatch, rates: Sequence[float], current: int, wanted: int
    ) -> float:
        """Seconds that a trial may lose; what is neither known nor next to what is served may be
        far dearer than it seems.
        """
        shape = self._candidates[wanted].shape(batch)
        near = self._load.is_known(shape) or abs(wanted - current) == 1
        seconds = TRIAL_CYCLES * self._load.seconds(shape) * (1 if near else _FAR)
        better = rates[wanted] / rates[current] / (1 if near else _FAR)
        return seconds * max(1.0 - better, 0.0) + self._catch_up_seconds(batch, wanted)


def _is_seeded(sequence: SequenceState) -> bool:
    """Whether its answer must come again, and so be drafted alike."""
    return sequence.sampling.seed is not None and not sequence.sampling.greedy
