"""LoadCosts: what cycles cost, and what tokens are worth, under the present load.

A plain step *rides* where it runs in one forward with prompts (``Decoder.mixes``). That forward
reads the weights and is launched in any case, so that the step adds little to it. A tree's cycle
runs by itself. So the more often prompts come, the less a plain step costs, and the less a tree
gains over as many plain steps as emit its tokens.

A draft that follows prompts runs over each of them, too. Where they come often, and answers are
short, that takes more than its trees win.

Sequences whose prompts are ready decode soon. Where many wait for that, few decode now, and what a
tree emits more for them would have been emitted by cheaper steps of more sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trt_eagle3.decode.cycle_cost import CycleCosts, Shape
from trt_eagle3.decode.plan import Cycle
from trt_eagle3.decode.switch_cost import nearer

__all__ = ["LoadCosts"]

_WINDOW = 128.0  # plain steps that count: prompts come in bursts, as when a server begins
_LEAST_RIDE = 0.09
"""Of a plain cycle that a riding step costs at least: attention is launched for its rows alone. Of
the 4.1 ms of one sequence (8B, H200) it takes 36 times 9.9 us (docs/measurements.md)."""
_FOLLOWING = 0.25
"""Of a plain cycle of one sequence that the draft takes over the prompts of a forward, until that
was seen: 1.05 ms at 1,000 rows of an 8B (``bench.modelled_times``)."""
_FADED = 1e-3  # of what is known is forgotten in a cycle in which the draft follows nobody


class LoadCosts:
    """``CycleCosts`` in which plain steps cost what they do on the average of the last ones, of
    which some rode with prompts, or would have.
    """

    def __init__(self, costs: CycleCosts) -> None:
        """``costs``: of cycles that run alone."""
        self._costs = costs
        self._riding = self._joining = 0.0  # of a plain step, on the average
        self._following = _FOLLOWING

    def observe(self, cycle: Cycle) -> None:
        """Count the prompts beside ``cycle``, and the plain steps that it stands for."""
        steps = cycle.plain_steps
        keep = math.exp(-steps / _WINDOW)
        self._riding = keep * self._riding + (1.0 - keep) * (cycle.joining > 0) / steps
        self._joining = keep * self._joining + (1.0 - keep) * cycle.joining
        if self._costs.is_timed and cycle.following:
            self._following = nearer(self._following, cycle.following / self._costs.one_seconds)
        else:
            self._following += _FADED * (_FOLLOWING - self._following)

    def followed(self, shape: Shape, speed: float) -> float:
        """What is left of ``speed``, times that of plain decoding, once the draft also runs over
        the prompts that come; ``shape``: of a plain cycle.
        """
        following = self._riding * self._following * self._costs.one_seconds
        return speed / (1.0 + speed * following / self.seconds(shape))

    def seconds(self, shape: Shape) -> float:
        """What a cycle of ``shape`` is expected to cost, in the unit of ``CycleCosts.seconds``."""
        alone = self._costs.seconds(shape)
        return alone if shape.num_nodes > 1 else alone - self._riding * self._saved(alone)

    def speed(self, shape: Shape, steps: float) -> float:
        """Times as fast as plain decoding that cycles of ``shape`` are expected to be, where each
        emits as much as so many plain ``steps``.
        """
        if shape.num_nodes == 1:
            return 1.0
        plain = replace(shape, num_nodes=1, steps=0)
        return self.instead(plain, steps) / self._costs.seconds(shape)

    def instead(self, shape: Shape, steps: float) -> float:
        """What so many plain ``steps`` of ``shape`` are expected to cost, had no tree emitted their
        tokens.
        """
        alone = self._costs.seconds(shape)
        later = self._later(shape, alone, self._joining)
        return steps * max(later - self._riding * self._saved(alone), 0.0)

    def worth(self, cycle: Cycle, shape: Shape) -> float:
        """What the plain steps cost that emit the tokens of ``cycle``; ``shape``: of one."""
        alone = self._costs.seconds(shape)
        rides = cycle.joining > 0 and not cycle.is_quiet
        each = alone if cycle.tree is None else self._later(shape, alone, cycle.joining)
        return cycle.plain_steps * each - rides * self._saved(alone)

    def is_known(self, shape: Shape) -> bool:
        """As ``CycleCosts.is_known``."""
        return self._costs.is_known(shape)

    def doubt(self, shape: Shape) -> float:
        """As ``CycleCosts.doubt``."""
        return self._costs.doubt(shape)

    def _saved(self, alone: float) -> float:
        """What a step that takes ``alone`` by itself takes less if it rides: the part that does not
        depend on the number of its rows, which is all of a step of one sequence.
        """
        return min(self._costs.one_seconds, (1.0 - _LEAST_RIDE) * alone)

    def _later(self, shape: Shape, alone: float, joining: float) -> float:
        """What a step of ``shape`` costs, which takes ``alone`` now, once ``joining`` more decode
        beside.
        """
        size = shape.batch_size + round(joining)
        together = self._costs.seconds(replace(shape, batch_size=size)) if joining else alone
        return min(alone, together * shape.batch_size / size)
