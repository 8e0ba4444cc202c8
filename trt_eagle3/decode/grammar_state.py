"""Where a sequence stands in its grammar, and which tokens that allows at every node of a tree.

Shapes: T tree nodes, V vocab, W = ceil(V / 32) words of a mask, whose bit i of word w is token
32 w + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarState", "Words", "allows"]

Words = np.ndarray[Any, np.dtype[np.int32]]
"""Masks on the host: threads that torch knows nothing of write them."""

_ALL = -1  # word of a mask
_DECAY = 0.9  # per tree, of the share of drafted tokens that the grammar forbade


class GrammarState:
    """A grammar after the tokens of one answer.

    Attributes:
        vocab_size: V.
        finished: an end token was emitted. error: why it can judge no more tokens; empty while it
            can. forbidden: decayed share of drafted tokens that it forbade, of those whose parents
            it allowed.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        """``matcher``: this sequence's own, at its beginning."""
        self._matcher = matcher
        self.vocab_size = vocab_size
        self._ends = frozenset(end_ids)
        self._min_tokens, self._ignore_eos = min_tokens, ignore_eos
        self._count = 0  # tokens of the answer
        self.finished = False
        self.error = ""
        self.forbidden = 1.0

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has these tokens too."""
        for token in tokens:
            if self.finished or self.error:
                return
            self._count += 1
            if token in self._ends:
                self.finished = True
            elif not self._matcher.consume_token(token):
                self.error = self._matcher.get_error() or f"token {token} was not allowed"

    def after(self, token: int) -> GrammarState | None:
        """A copy that stands one token further; None where ``token`` is forbidden or the last."""
        if self.finished or self.error or token in self._ends:
            return None
        if self._matcher.validate_tokens([token]) != 1:
            return None
        copy = GrammarState(
            self._matcher.deep_copy(),
            tuple(self._ends),
            self.vocab_size,
            min_tokens=self._min_tokens,
            ignore_eos=self._ignore_eos,
        )
        copy._count = self._count
        copy.advance([token])
        return copy

    def fill_next(self, row: Words) -> None:
        """Write what is allowed next into ``row`` int32 [W], on the host."""
        self.fill([-1], [-1], row[None])

    def fill(self, tokens: Sequence[int], parents: Sequence[int], rows: Words) -> None:
        """Write what is allowed after every node of a tree into ``rows`` int32 [T, W], on the host.

        A node that cannot be accepted, and an end token, allow all: nothing that follows is read.
        So does all where the grammar can judge no more: ``error`` says so.

        Args:
            tokens: of the nodes, parents first; the root's stands in the answer already.
            parents: indices; the root's is -1.
        """
        rows.fill(_ALL)
        if self.error or self.finished:
            return
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)
        tried = _Walk(self, tokens, children, rows)
        tried.visit(0, self._count)
        if tried.num_seen:
            share = tried.num_forbidden / tried.num_seen
            self.forbidden = _DECAY * self.forbidden + (1 - _DECAY) * share

    def fill_here(self, row: Words, count: int) -> bool:
        """``fill`` of the matcher's own place, ``count`` tokens into the answer; False where the
        grammar can judge no more.
        """
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            self.error = matcher.get_error()
            return False
        if self._ignore_eos or count < self._min_tokens:
            self._postpone_end(row)
        return True

    def _postpone_end(self, row: Words) -> None:
        """Take the end tokens out of ``row``, if that leaves any."""
        others = row.copy()
        for token in self._ends:
            others[token >> 5] &= ~_bit(token)
        if others.any():
            row[:] = others

    def step(self, token: int) -> None:
        """Go down to an allowed node; ``back`` undoes it."""
        self._matcher.consume_token(token)

    def back(self) -> None:
        """Undo the last ``step``."""
        self._matcher.rollback(1)

    def ends(self, token: int) -> bool:
        """Whether ``token`` is an end token."""
        return token in self._ends


class _Walk:
    """One walk over the nodes of a tree, down and back up."""

    def __init__(
        self,
        state: GrammarState,
        tokens: Sequence[int],
        children: Sequence[Sequence[int]],
        rows: Words,
    ) -> None:
        self._state, self._tokens, self._children, self._rows = state, tokens, children, rows
        self.num_seen = self.num_forbidden = 0

    def visit(self, node: int, count: int) -> bool:
        """Fill the rows of ``node`` and what is below it; the matcher stands there. False where the
        grammar can judge no more.
        """
        row = self._rows[node]
        if not self._state.fill_here(row, count):
            self._rows.fill(_ALL)
            return False
        for child in self._children[node]:
            token = self._tokens[child]
            allowed = allows(row, token)
            self.num_seen += 1
            self.num_forbidden += not allowed
            if allowed and not self._state.ends(token):
                self._state.step(token)
                if not self.visit(child, count + 1):
                    return False
                self._state.back()
        return True


def allows(row: Words, token: int) -> bool:
    """Whether ``row`` int32 [W] allows ``token``."""
    return bool(int(row[token >> 5]) & _bit(token))


def _bit(token: int) -> int:
    """Of its word, as int32."""
    bit = token & 31
    return 1 << bit if bit < 31 else -(1 << 31)
