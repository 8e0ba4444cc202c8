"""Log-probabilities of a prompt's tokens, from the target's raw distribution at each position.

As in vLLM, the first token has none, and the placeholder tokens of images and videos have theirs.

Shapes: N tokens of the prompt, n of its rows, V vocab, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from trt_eagle3.decode.sampling.logprobs import TokenLogprob, packed_logprobs
from trt_eagle3.host_copy import Readback

__all__ = ["Logprob", "PromptLogprobs", "PromptLogprobsReadback"]

_ROWS = 8  # float64 copies of this many rows of the vocabulary exist at a time


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at a position of the prompt.

    Attributes:
        logprob: natural logarithm, of the raw distribution.
        rank: 1 for the likeliest token.
    """

    logprob: float
    rank: int


class PromptLogprobs(Sequence[dict[int, Logprob] | None]):
    """The result of ``SamplingParams.prompt_logprobs``: an entry for each token of the prompt.

    The entry of the first token is None. Each other one maps token ids to their ``Logprob``: the
    prompt's own token first, then the likeliest tokens, best first. Entries are made when they are
    read, because those of a long prompt take seconds.
    """

    def __init__(self, token_ids: Sequence[int], num_best: int) -> None:
        """Make the entries of the prompt ``token_ids`` with ``num_best`` likeliest tokens each."""
        count = len(token_ids)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.num_best = num_best
        self.num_launched = 0
        """Rows whose log-probabilities are computed, or are being computed."""
        self._ranks = np.zeros(count, dtype=np.int32)
        self._own = np.full(count, np.nan)
        self._best = np.full((count, num_best), np.nan)
        self._best_ids = np.zeros((count, num_best), dtype=np.int32)

    @property
    def num_rows(self) -> int:
        """Rows of the prompt that predict one of its tokens."""
        return len(self.token_ids) - 1

    def put(self, start: int, found: Sequence[Sequence[float]]) -> None:
        """Store what was computed of the rows from ``start`` on (``PromptLogprobsReadback``).

        Row t predicts token t + 1.
        """
        values = np.asarray(found).reshape(-1, 3 + 2 * self.num_best)
        tokens = slice(start + 1, start + 1 + len(values))
        self._ranks[tokens] = values[:, 0]
        self._own[tokens] = values[:, 2]
        self._best[tokens] = values[:, 3 : 3 + self.num_best]
        self._best_ids[tokens] = values[:, 3 + self.num_best :]

    def token(self, index: int) -> TokenLogprob | None:
        """Return the entry of a token as an answer's tokens have it; None for the first one."""
        if index == 0:
            return None
        pairs = zip(self._best_ids[index].tolist(), self._best[index].tolist(), strict=True)
        return TokenLogprob(int(self.token_ids[index]), float(self._own[index]), tuple(pairs))

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...

    def __getitem__(
        self, index: int | slice
    ) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self.token(range(len(self))[index])
        if found is None:
            return None
        own = {found.token_id: Logprob(found.logprob, int(self._ranks[index]))}
        best = {t: Logprob(value, rank) for rank, (t, value) in enumerate(found.top, start=1)}
        return own | best

    def __repr__(self) -> str:
        return f"PromptLogprobs({len(self)} tokens, {self.num_best} likeliest)"


class PromptLogprobsReadback:
    """Copies the log-probabilities of some rows of a prompt to the host."""

    def __init__(self, found: PromptLogprobs, start: int, logits: Tensor, next_ids: Tensor) -> None:
        """Start the copy.

        Args:
            found: where to put them. start: the first row.
            logits: f32 [n, V]. next_ids: int64 [n], the token after each row.
        """
        self._found, self._start = found, start
        parts = zip(logits.split(_ROWS), next_ids.split(_ROWS), strict=True)
        rows = [_packed(some, ids, found.num_best) for some, ids in parts]
        self._values = Readback(torch.cat(rows))

    def put(self) -> None:
        """Wait for the copy, and store it."""
        self._found.put(self._start, self._values.wait())


def _packed(logits: Tensor, tokens: Tensor, num_best: int) -> Tensor:
    """Put the ranks of ``tokens`` before what ``packed_logprobs`` returns."""
    above = logits > logits.gather(1, tokens[:, None])
    ranks = 1 + above.sum(dim=1, keepdim=True).double()
    return torch.cat([ranks, packed_logprobs(logits, tokens, num_best)], dim=1)
