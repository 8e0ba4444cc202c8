"""Whether keeping drafts to a grammar pays, tried as answers go.

Drafts that are kept to it cost every cycle of a batch: the host must know what was said, and
compute masks, before anything is proposed. A draft that follows the target proposes little that is
forbidden, and one that follows nothing gains nothing. So drafts are kept to a grammar only where it
forbids many of them, and only as long as answers come faster for it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FilterTrial"]

_TREES = 8  # of a look at drafts as they are, and of one at drafts that are kept to the grammar
_REST = 128  # trees until the next look
_FEW_FORBIDDEN = 0.2  # share of drafted tokens
_GAIN = 1.1  # in tokens of a tree


@dataclass
class _Sum:
    trees: int = 0
    forbidden: float = 0.0
    tokens: int = 0


class FilterTrial:
    """Of one grammar: all answers with it share what they find.

    Attributes:
        wanted: keep the next drafts to it.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._as_is, self._kept = _Sum(), _Sum()
        self._rest = 0

    def add(self, forbidden: float, num_tokens: int, *, filtered: bool) -> None:
        """A tree of which it forbade the share ``forbidden``, and ``num_tokens`` were emitted;
        ``filtered``: its draft was kept to the grammar.
        """
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self.wanted, self._as_is, self._kept = False, _Sum(), _Sum()
            return
        found = self._kept if filtered else self._as_is
        found.trees += 1
        found.forbidden += forbidden
        found.tokens += num_tokens
        if self._as_is.trees < _TREES:
            return
        if self._as_is.forbidden < _FEW_FORBIDDEN * self._as_is.trees:
            self._settle(wanted=False)
        elif self._kept.trees < _TREES:
            self.wanted = True
        else:
            before = self._as_is.tokens / self._as_is.trees
            self._settle(wanted=self._kept.tokens >= _GAIN * before * self._kept.trees)

    def _settle(self, *, wanted: bool) -> None:
        self.wanted, self._rest = wanted, _REST
