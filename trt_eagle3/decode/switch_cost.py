"""SwitchCosts: what it costs to begin to draft, and to stop, besides the cycles themselves."""

from __future__ import annotations

from trt_eagle3.decode.cycle_cost import on_line

__all__ = ["SwitchCosts", "nearer"]

_CALL = 0.05  # of a plain cycle of one sequence: a forward of the draft that catches up
_ROW = 1 / 1000  # of such a cycle, for each row that it catches up with
_TURN = 0.2  # of a plain cycle: nothing was launched ahead for the first cycle of another kind
_NEWS = 0.3  # how much the last one observed says
_FAR = 4.0  # times what is known: a capture or an allocation


class SwitchCosts:
    """Seconds for the draft to catch up with the rows of plain cycles, and for asynchronous cycles
    to turn: reckoned at first, or as catching up was measured ahead, then as they were observed.
    """

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}  # seconds by rows, in ascending order
        self._catch_up = 1.0  # times what is reckoned
        self._turn = _TURN  # of a plain cycle

    def catch_up(self, num_rows: int, one_seconds: float) -> float:
        """Seconds to catch up with ``num_rows`` rows of all sequences together; ``one_seconds``: of
        a plain cycle of one sequence.
        """
        return self._catch_up * self._expected(num_rows, one_seconds)

    def prime_catch_up(self, num_rows: int, seconds: float) -> None:
        """Know how long it takes to catch up with ``num_rows`` rows, before anything is served."""
        seconds = max(seconds, self._measured.get(num_rows, 0.0))
        self._measured = dict(sorted({**self._measured, num_rows: seconds}.items()))

    def turn(self, plain_seconds: float) -> float:
        """Seconds to stop drafting; ``plain_seconds``: of a plain cycle of the same batch."""
        return self._turn * plain_seconds

    def observe_catch_up(self, num_rows: int, seconds: float, one_seconds: float) -> None:
        """Learn from rows that were caught up with in ``seconds``."""
        self._catch_up = nearer(self._catch_up, seconds / self._expected(num_rows, one_seconds))

    def observe_turn(self, seconds: float, plain_seconds: float) -> None:
        """Learn from the first plain cycle after one that drafted, ``seconds`` longer than others
        are.
        """
        self._turn = nearer(self._turn, seconds / plain_seconds)

    def _expected(self, num_rows: int, one_seconds: float) -> float:
        """Seconds to catch up with ``num_rows`` rows before any were caught up with."""
        if num_rows and self._measured:
            return on_line(self._measured, num_rows)
        return _reckoned(num_rows) * one_seconds


def _reckoned(num_rows: int) -> float:
    """Plain cycles of one sequence for the draft to catch up with ``num_rows`` rows."""
    return _CALL + _ROW * num_rows if num_rows else 0.0


def nearer(known: float, found: float) -> float:
    """What is known of a cost, 0 or more, once it was ``found``."""
    return known + _NEWS * (min(max(found, 0.0), _FAR * known) - known)
