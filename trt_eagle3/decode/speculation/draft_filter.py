"""DraftFilter: mask draft logits by grammars, if that pays (``filter_trial``).

At the first level the host has the grammar state of each sequence. Each deeper level costs a wait
for the device and copies of states. So on a GPU only a few sequences are filtered there.

Shapes: B sequences, m rows of each that a level runs, V vocab, Vd draft vocab, W = ceil(V / 32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trt_eagle3.decode.sampling.grammar_masks import fill_trees
from trt_eagle3.decode.sampling.grammar_state import GrammarState
from trt_eagle3.decode.sampling.logits_process import AllowedTokens, forbidden_tokens
from trt_eagle3.decode.sampling.sampler import Sampler
from trt_eagle3.host_copy import host_buffer

__all__ = ["DraftFilter", "filtered_states"]

_MOST_DEEP = 4  # most sequences whose deeper levels are filtered: each one's state is copied
_LEAST_SHARE = 8  # at least 1 of 8 sequences must gain, because the whole batch waits


def filtered_states(samplers: Sequence[Sampler | None]) -> list[GrammarState | None]:
    """Return the grammars that drafts may be filtered by, one per row.

    None for a sequence that samples: its use of random numbers depends on its drafts. A seed must
    reproduce the answer, whatever ``filter_trial`` measured before.
    """
    return [s.grammar if s is not None and s.sampling.greedy else None for s in samplers]


class DraftFilter:
    """The grammar states of B sequences at the draft's rows, level by level."""

    def __init__(
        self, states: Sequence[GrammarState | None], target_ids: Callable[[Tensor], Tensor]
    ) -> None:
        """Create a filter for one batch.

        ``states``: by row of the batch; None: no grammar. ``target_ids``: maps draft ids to target
        ids.
        """
        self._target_ids = target_ids
        live = {i: s for i, s in enumerate(states) if s is not None and not s.finished}
        self._rows: dict[int, list[GrammarState | None]] = {i: [s] for i, s in live.items()}
        self._deep = {i for i, s in live.items() if s.trial.filters}
        for state in live.values():
            state.filtered = True

    @staticmethod
    def pays(states: Sequence[GrammarState | None]) -> bool:
        """Return whether filtering the drafts of a batch is expected to pay."""
        num_filtered = sum(s is not None and s.live and s.trial.filters for s in states)
        return num_filtered > 0 and num_filtered * _LEAST_SHARE >= len(states)

    def first(self, logits: Tensor) -> Tensor:
        """Mask forbidden tokens in ``logits`` f32 [B, 1, Vd] after the roots."""
        return self._masked(logits) if self._rows else logits

    def level(self, logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Mask forbidden tokens in ``logits`` f32 [B, m, Vd] of the rows of a level.

        Args:
            tokens: int64 [B, m]: the tokens of the rows.
            parents: int64 [m] or [B, m]: index of each row's parent in the level above.
        """
        if logits.is_cuda:
            few = len(self._deep) <= _MOST_DEEP
            self._rows = {i: rows for i, rows in self._rows.items() if few and i in self._deep}
        if not self._rows:
            return logits
        both = torch.stack([tokens, parents.to(tokens.device).expand_as(tokens)])
        of_tokens, of_parents = both[:, list(self._rows)].tolist()
        for i, ran, above in zip([*self._rows], of_tokens, of_parents, strict=True):
            held = [self._rows[i][parent] for parent in above]
            self._rows[i] = [
                state.after(token) if state is not None else None
                for state, token in zip(held, ran, strict=True)
            ]
        return self._masked(logits) if self._vocab_size else logits

    @property
    def _vocab_size(self) -> int:
        states = (state for rows in self._rows.values() for state in rows)
        return max((state.vocab_size for state in states if state is not None), default=0)

    def _masked(self, logits: Tensor) -> Tensor:
        """Return a copy of ``logits`` [B, m, Vd], each row masked by its grammar state."""
        device, vocab_size = logits.device, self._vocab_size
        each = [
            (state, (i, place))
            for i, rows in self._rows.items()
            for place, state in enumerate(rows)
            if state is not None
        ]
        bits = host_buffer((len(each), -(-vocab_size // 32)), torch.int32, device)
        found = fill_trees([(state, [-1], [-1]) for state, _ in each], bits.numpy())
        allowed = AllowedTokens.from_masks(device, bits, found, [[node] for _, node in each])
        if allowed is None:
            return logits
        ids = self._target_ids(torch.arange(logits.shape[2], device=device))
        forbidden = forbidden_tokens(allowed.bits, vocab_size)[:, ids]
        rows, places = logits.flatten(0, 1), allowed.places(logits.shape[1])
        kept = rows.index_select(0, places).masked_fill_(forbidden, -torch.inf)
        return rows.index_copy(0, places, kept).view_as(logits)
