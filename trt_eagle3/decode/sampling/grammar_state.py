"""GrammarState: the state of a grammar after an answer's tokens, and the tokens allowed next.

Shapes: T tree nodes, V vocab, W = ceil(V / 32) words of a mask. Bit i of word w is token 32 w + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_eagle3.decode.sampling.filter_trial import FilterTrial

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["ALL_ALLOWED", "GrammarState", "Words"]

Words = np.ndarray[Any, np.dtype[np.int32]]
"""Masks on the host, as numpy arrays: llguidance's own threads write them."""

ALL_ALLOWED = -1
"""Word of a mask that allows all its tokens."""


class GrammarState:
    """A grammar after the tokens of one answer.

    Attributes:
        vocab_size: V.
        finished: an end token was emitted. error: why the grammar failed; empty without an error.
        trial: measures whether filtering drafts pays. filtered: the next tree to verify was
            filtered by this grammar.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        trial: FilterTrial | None = None,
    ) -> None:
        """Create a state.

        ``matcher``: owned by this sequence, in its start state. ``min_tokens``, ``ignore_eos``: as
        in ``SamplingParams``. ``trial``: shared by all answers with this grammar.
        """
        self.matcher = matcher
        self.trial = trial or FilterTrial()
        self.filtered = False
        self._verified: float | None = None  # forbidden share of the last verified tree
        self.vocab_size = vocab_size
        self._ends = frozenset(end_ids)
        self._min_tokens, self._ignore_eos = min_tokens, ignore_eos
        self._count = 0  # tokens of the answer
        self.finished = False
        self.error = ""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the state by tokens of the answer."""
        if self._verified is not None:
            self.trial.add(self._verified, len(tokens), filtered=self.filtered)
            self._verified, self.filtered = None, False
        for token in tokens:
            if self.finished or self.error:
                return
            self._count += 1
            if token in self._ends:
                self.finished = True
            elif not self.matcher.consume_token(token):
                self.error = self.matcher.get_error() or f"token {token} was not allowed"

    def after(self, token: int) -> GrammarState | None:
        """Return a copy advanced by ``token``; None if it is forbidden or ends the answer."""
        if self.finished or self.error or token in self._ends:
            return None
        if self.matcher.validate_tokens([token]) != 1:
            return None
        copy = GrammarState(
            self.matcher.deep_copy(),
            tuple(self._ends),
            self.vocab_size,
            min_tokens=self._min_tokens,
            ignore_eos=self._ignore_eos,
            trial=self.trial,
        )
        copy._count = self._count
        copy.advance([token])
        return copy

    @property
    def live(self) -> bool:
        """Whether it still constrains the next tokens."""
        return not (self.finished or self.error)

    def is_end(self, token: int) -> bool:
        """Return whether ``token`` ends the answer."""
        return token in self._ends

    def end_tree(self, forbidden: float | None) -> None:
        """Store the share of a tree's drafted tokens that its masks forbid.

        ``forbidden``: counts only tokens whose parent is allowed. None: there was no such token.
        """
        self._verified = forbidden

    @property
    def postpones_end(self) -> bool:
        """Whether end tokens may be forbidden after the next token."""
        return self._ignore_eos or self._count < self._min_tokens

    def postpone_end(self, row: Words, depth: int) -> None:
        """Forbid the end tokens in the mask ``row`` int32 [W] of a node, if they come too early.

        ``depth``: of the node; the root's is 0. A mask that allows only end tokens is not changed.
        """
        if not self._ignore_eos and self._count + depth >= self._min_tokens:
            return
        others = row.copy()
        for token in self._ends:
            others[token >> 5] &= ~_bit(token)
        if others.any():
            row[:] = others


def _bit(token: int) -> int:
    """Return the bit of ``token`` in its word, as int32."""
    bit = token & 31
    return 1 << bit if bit < 31 else -(1 << 31)
