"""SpeculationPolicy: choose the tree of the next step by goodput.

    goodput(tree) = expected tokens of a step / expected seconds of a step

The best tree is served. It changes only for a gain of ``_GAIN``. Acceptance starts from an
optimistic prior, so a new engine drafts at first. Observations decay, so a draft that was switched
off is probed again. An account bounds the loss of drafting against autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from trt_eagle3.decode.policy.acceptance import Acceptance
from trt_eagle3.decode.policy.candidate import TreeCandidate
from trt_eagle3.decode.policy.cost import StepCost, load_bucket
from trt_eagle3.decode.policy.protocol import BatchState, StepStats
from trt_eagle3.decode.speculation.tree import AnyTree

__all__ = ["SpeculationPolicy"]

_GAIN = 1.03
"""Least gain in goodput for a change of tree; it reflects the uncertainty of costs."""
_DECIDE_EVERY = 8
"""Steps between decisions. Every step decides while the first level has few observations."""
_EXPLORED = 32
"""First tokens that are drafted before the policy may choose no tree. Otherwise costs alone could
exclude a draft before its acceptance is measured."""
_HARDLY_KNOWN = 32.0
"""Below this number of observations of a first level, every step decides."""
_PROBE_SHARE = 0.005
"""Share of the steps that probes of other candidates may lose while a tree is served."""
_PROBE_STEPS = 8
"""Steps of a probe."""
_FIRST_STEPS = 32
"""Steps before the first probe, so that all of a short first answer is drafted."""
_LEAST_LOSS = 0.1
"""Least share of goodput that a probe is charged; it reflects the uncertainty of costs."""
_LOSS_SHARE = 0.015
"""Share of the steps that drafting may lose against autoregressive decoding."""
_LOSS_CREDIT = 16.0
"""Upper bound and initial value of the account, in autoregressive steps."""


class SpeculationPolicy:
    """Chooses among candidates by goodput. Not thread-safe: only the scheduler calls it.

    A batch with a seeded sequence gets the configured tree: the use of random numbers depends on
    the tree, and a seed must reproduce its answer.
    """

    speculates = True

    def __init__(self, candidates: Sequence[TreeCandidate]) -> None:
        """Create a policy. ``candidates``: no tree first, the configured tree last."""
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self._candidates = candidates
        self._index = {c.tree: i for i, c in enumerate(candidates)}
        self._served: dict[int, int] = {}  # candidate by load bucket
        self._admitted: dict[int, bool] = {}  # by load bucket, until the next decision
        self._steps = 0
        self._explored = 0  # first tokens that were drafted
        # the first probe serves no tree, and its credit is granted in advance
        self._probed, self._probe_left, self._probe_credit = -1, 0, float(_PROBE_STEPS)
        self._balance = _LOSS_CREDIT  # autoregressive steps that may still be lost
        self._blocked = False

    @property
    def needs_costs(self) -> bool:
        """Whether no step has been measured yet."""
        return not self.cost.is_known

    def choose(self, batch: BatchState) -> AnyTree | None:
        """Choose the tree for ``batch``; None: no speculation."""
        if not batch.num_drafting:
            return None
        if batch.seeded:
            return self._candidates[-1].tree
        if self._blocked:
            return None
        if self._probe_left:
            return self._candidates[self._probed].tree
        load = load_bucket(batch.num_running)
        if load not in self._served:
            self._decide(batch)
        return self._candidates[self._served[load]].tree

    def should_draft(self, batch: BatchState) -> bool:
        """Return whether to draft a new sequence. ``batch``: includes the new sequence."""
        if batch.seeded or self._explored < _EXPLORED:
            return True
        load = load_bucket(batch.num_running)
        if load not in self._admitted:
            size = batch.num_running
            all_draft = BatchState(size, size, size)
            found = self._goodputs(all_draft)
            served = self._served.get(load, 0)
            self._admitted[load] = served > 0 or max(found[1:]) >= _GAIN * found[0]
        return self._admitted[load]

    def trees_at(self, batch_size: int) -> Sequence[AnyTree | None]:
        """Return every candidate's tree, highest expected goodput first."""
        found = self._goodputs(BatchState(batch_size, batch_size, batch_size))
        order = sorted(range(len(found)), key=found.__getitem__, reverse=True)
        return [self._candidates[i].tree for i in order]

    def prime(self, tree: AnyTree | None, batch_size: int, seconds: float) -> None:
        """Add a step that was measured at start, with short contexts."""
        if tree in self._index:
            self.cost.prime(tree.num_nodes if tree else 1, batch_size, seconds)

    def prime_prompts(self, num_rows: int, seconds: float) -> None:
        """Add a prefill that was measured at start."""
        self.cost.prime_prompts(num_rows, seconds)

    def prompt_rows(self, batch: BatchState, seconds: float) -> int | None:
        """Return how many prompt rows fit into ``seconds`` beside a step of ``batch``."""
        if not self.cost.knows_prompts:
            return None
        tree = self.choose(batch)
        nodes = tree.num_nodes if tree else 1
        return self.cost.prompt_rows(seconds, nodes, batch.size, batch.num_running)

    def record(self, stats: StepStats) -> None:
        """Update acceptance and costs from a step; decide and probe when due."""
        index, batch = self._index.get(stats.tree), stats.batch
        if index is None or not batch.size:
            return
        self._steps += 1
        levels = self._candidates[index].levels
        if levels:
            accepted = [n for n in stats.accepted if n is not None]
            self.acceptance.observe(levels, accepted)
            self._explored += len(accepted)
        self._charge(stats)
        if stats.seconds is not None and not stats.backfilled_rows:
            self.cost.observe(
                stats.num_nodes, batch.size, batch.num_running, stats.prompt_rows, stats.seconds
            )
        self._probe_left = max(self._probe_left - 1, 0)
        is_time = self._steps % _DECIDE_EVERY == 0
        if is_time:
            self.acceptance.fade(_DECIDE_EVERY)
            self._admitted.clear()
        hardly = bool(levels) and self.acceptance.tried(levels[0]) < _HARDLY_KNOWN
        if batch.num_drafting and not batch.seeded and (is_time or hardly):
            self._decide(batch)
            if is_time:
                self._probe(batch)

    def _decide(self, batch: BatchState) -> None:
        load, found = load_bucket(batch.num_running), self._goodputs(batch)
        served = self._served.get(load)
        if self._explored < _EXPLORED:
            found[0], served = 0.0, None
        best = max(range(len(found)), key=found.__getitem__)
        if served is None or found[best] > _GAIN * found[served]:
            self._served[load] = best

    def _goodputs(self, batch: BatchState) -> list[float]:
        """Return the expected tokens per second of each candidate."""
        found = []
        for candidate in self._candidates:
            more = self.acceptance.expected_tokens(candidate.levels) - 1.0
            tokens = batch.size + batch.num_drafting * more
            nodes = candidate.num_nodes
            found.append(tokens / self.cost.seconds(nodes, batch.size, batch.num_running))
        return found

    def _charge(self, stats: StepStats) -> None:
        """Charge the account with a drafted step's loss, or credit its gain."""
        batch = stats.batch
        if stats.seconds is None or not self.cost.is_known:
            return
        self._balance += _LOSS_SHARE
        if stats.tree is not None:
            alone = self.cost.seconds(1, batch.size, batch.num_running)
            spent = self.cost.seconds(stats.num_nodes, batch.size, batch.num_running)
            if stats.backfilled_rows:
                spent = max(self.cost.without_prompts(stats.seconds, stats.prompt_rows), spent)
            self._balance += stats.num_tokens / batch.size - spent / alone
        self._balance = min(self._balance, _LOSS_CREDIT)
        self._blocked = self._balance < (_LOSS_CREDIT / 2 if self._blocked else 0.0)

    def _probe(self, batch: BatchState) -> None:
        """Serve another candidate for a few steps, in rotation, if a tree is served now."""
        served = self._served[load_bucket(batch.num_running)]
        if not served or self._probe_left:
            return
        self._probe_credit += _PROBE_SHARE * _DECIDE_EVERY
        found, candidate = self._goodputs(batch), (self._probed + 1) % len(self._candidates)
        loss = max(1.0 - found[candidate] / found[served], _LEAST_LOSS)
        if self._steps > _FIRST_STEPS and self._probe_credit >= loss * _PROBE_STEPS:
            self._probe_credit -= loss * _PROBE_STEPS
            self._probed, self._probe_left = candidate, _PROBE_STEPS
