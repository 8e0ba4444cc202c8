"""Accepted length of a chain of drafted tokens, from every row of an answer, without an engine.

Shapes: A tokens of an answer, T = A - 1 rows at which a chain begins, n rows of the sequence, Hd
draft hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.parity.reference.draft import DraftRows
from trt_eagle3.parity.reference.drafting import AutoregressiveReference
from trt_eagle3.parity.reference.expected import ExpectedAnswer

__all__ = ["ChainAcceptance", "accepted_chains", "chain_acceptance"]


@dataclass(frozen=True)
class ChainAcceptance:
    """Acceptance over some answers.

    Attributes:
        first: share of rows in which the draft's first token is the target's best token.
        length: mean tokens emitted per target forward that verified a chain, bonus token included;
            None if every answer ends inside its first chain.
    """

    first: float
    length: float | None


def chain_acceptance(accepted: Sequence[Tensor], steps: int) -> ChainAcceptance:
    """Compute the acceptance of chains of ``steps`` tokens.

    ``accepted``: of each answer, the accepted tokens from each row (``DraftParity.accepted``).
    """
    rows = torch.cat(list(accepted))
    emitted = [n for one in accepted for n in _emitted(one.tolist(), steps)]
    length = sum(emitted) / len(emitted) if emitted else None
    return ChainAcceptance(float((rows > 0).double().mean()) if len(rows) else 0.0, length)


def _emitted(accepted: Sequence[int], steps: int) -> list[int]:
    """Return the tokens of consecutive forwards.

    Forwards near the end of the answer are skipped: a chain could not be accepted whole there.
    """
    found, row = [], 0
    while row + steps <= len(accepted):
        found.append(accepted[row] + 1)
        row += accepted[row] + 1
    return found


def accepted_chains(drafting: AutoregressiveReference, e: ExpectedAnswer, steps: int) -> Tensor:
    """Compute ``DraftParity.accepted``. Draft row t holds token t + 1."""
    best, count = e.logits.argmax(dim=-1), e.answer.num_rows - 1
    first = e.answer.prompt_len - 1
    starts = torch.arange(first, count)
    told = e.answer.token_ids[e.answer.prompt_len :]
    chain = _Chain(drafting, e, starts, _true_rows(drafting, e, starts))
    alive = torch.ones(len(starts), dtype=torch.bool)
    accepted = torch.zeros(len(starts), dtype=torch.int64)
    for depth in range(1, steps + 1):
        places = torch.arange(len(starts)) + depth
        known = places < len(best)
        places = places.clamp(max=len(best) - 1)
        alive &= known & (chain.guesses == best[places])
        accepted += alive
        alive &= chain.guesses == told[places]
        if depth < steps and bool(alive.any()):
            chain.step(depth)
    return accepted


def _true_rows(drafting: AutoregressiveReference, e: ExpectedAnswer, starts: Tensor) -> DraftRows:
    """Run the draft over the whole answer, from the target's true hidden states."""
    draft, count = drafting.draft, e.answer.num_rows - 1
    aux = torch.cat([e.aux[k][:count] for k in drafting.manifest.aux_layers], dim=-1)
    features = draft.fuse(aux.to(drafting.target.device, draft.dtype))
    embeds = drafting.prompt_embeds(e.answer, draft.dtype)[:count].to(features)
    positions = drafting.positions(torch.arange(count), e.positions)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    return draft.run(embeds, features, positions.T, mask, logit_rows=starts)


class _Chain:
    """Chains from all rows at once; each row sees the answer up to its start, and its own chain.

    ``guesses``: int64 [T], target ids of the last level's best tokens.
    """

    def __init__(
        self, drafting: AutoregressiveReference, e: ExpectedAnswer, starts: Tensor, rows: DraftRows
    ) -> None:
        self._ref, self._positions, self._starts = drafting, e.positions, starts
        self._features = rows.features[starts.to(rows.features.device)]
        self._memory = rows.memory
        self._seen = torch.arange(len(rows.features)) <= starts[:, None]
        self.guesses = self._best(rows)

    def step(self, depth: int) -> None:
        """Draft the tokens after ``guesses``, which are ``depth`` beyond the starts."""
        ref, own = self._ref, torch.eye(len(self._starts), dtype=torch.bool)
        embeds, features = ref.embed(self.guesses, ref.draft.dtype), self._features
        if ref.mask_row is not None:
            embeds, features = (
                x.expand_as(features) for x in (ref.mask_row.embeds, ref.mask_row.features)
            )
        positions = ref.positions(self._starts + depth, self._positions)
        self._seen = torch.cat([self._seen, own], dim=1)
        found = ref.draft.run(embeds.to(features), features, positions.T, self._seen, self._memory)
        self._memory = [
            (torch.cat([k, new_k]), torch.cat([v, new_v]))
            for (k, v), (new_k, new_v) in zip(self._memory, found.memory, strict=True)
        ]
        self._features, self.guesses = found.features, self._best(found)

    def _best(self, rows: DraftRows) -> Tensor:
        return self._ref.target_ids(rows.logits.argmax(dim=-1).cpu())
