"""FilterTrial: measure while serving whether filtering drafts by a grammar pays.

Filtering costs time in every cycle of a batch: before anything is proposed, the host must have the
last tokens and compute masks. A good draft proposes few forbidden tokens. A useless draft gains
nothing from the filter. So drafts are filtered only if the grammar forbids many drafted tokens. The
filter must also raise the tokens per tree.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FilterTrial"]

_TREES = 8  # trees of a trial without the filter, and of a trial with it
_REST = 128  # trees until the next trial
_FEW_FORBIDDEN = 0.2  # share of drafted tokens below which the filter is off
_GAIN = 1.1  # least gain in tokens per tree


@dataclass
class _Sum:
    trees: int = 0
    forbidden: float = 0.0
    tokens: int = 0


class FilterTrial:
    """The trial of one grammar. All answers with this grammar share it.

    Attributes:
        filters: whether to filter the next drafts.
    """

    def __init__(self) -> None:
        self.filters = False
        self._as_is, self._kept = _Sum(), _Sum()
        self._rest = 0

    def add(self, forbidden: float, num_tokens: int, *, filtered: bool) -> None:
        """Add a verified tree.

        ``forbidden``: share of its drafted tokens that the grammar forbids. ``num_tokens``: emitted
        tokens. ``filtered``: whether its draft was filtered.
        """
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self.filters, self._as_is, self._kept = False, _Sum(), _Sum()
            return
        found = self._kept if filtered else self._as_is
        found.trees += 1
        found.forbidden += forbidden
        found.tokens += num_tokens
        if self._as_is.trees < _TREES:
            return
        if self._as_is.forbidden < _FEW_FORBIDDEN * self._as_is.trees:
            self._decide(filters=False)
        elif self._kept.trees < _TREES:
            self.filters = True
        else:
            before = self._as_is.tokens / self._as_is.trees
            self._decide(filters=self._kept.tokens >= _GAIN * before * self._kept.trees)

    def _decide(self, *, filters: bool) -> None:
        self.filters, self._rest = filters, _REST
