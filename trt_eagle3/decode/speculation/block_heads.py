"""BlockHeads: choose the tokens of a block from the logits and hidden states of its rows.

Without a sequential head, rows are independent. With one, tokens are chosen from left to right, and
each choice depends on the token before. All of it runs on the session's device. Only a grammar
filter makes the host wait.

DFlash2's selector, with the codebooks ``pred`` and ``succ``, the projection W and a row's hidden
state h, scores the likeliest tokens b of a row after token a:

    score(b | a) = logit(b) + <pred[a] * W h, succ[b]>

DSpark's markov head adds ``W2 latent`` to all logits of a row, where e = W1[a]:

    vanilla   latent = e
    gated     latent = sigmoid(gate_proj [h; e]) * e
    rnn       g, c, o = joint_proj [state; e; h]
              state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c),   latent = tanh(o)

Its confidence head estimates the probability that a row's token is accepted if those before it are:
``sigmoid(proj [h; e] / tau)``. It does not read the row's own token. So keeping the tokens up to a
confidence does not change the distribution of answers.

Shapes: B sequences, R rows that the heads run over, N drafted tokens, Hd draft hidden, Vd draft
vocab, V vocab, r rank, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.decode.speculation.draft_filter import DraftFilter
from trt_eagle3.decode.speculation.draft_sampling import DraftSampling
from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.engine.runtime.session import Continuation

__all__ = ["BlockDrafts", "BlockHeads", "RowScores"]


@dataclass(frozen=True)
class BlockDrafts:
    """The drafted tokens of a batch of blocks.

    Attributes:
        tokens: int64 [B, N] target ids.
        candidates: int64 [B, N, K] target ids and probs: float64 [B, N, K], the distributions that
            they were drawn from; None if all are the likeliest.
    """

    tokens: Tensor
    candidates: Tensor | None = None
    probs: Tensor | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Tensor]) -> BlockDrafts:
        """Make it of ``fields`` by name."""
        return cls(**fields)

    def fields(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name."""
        return {name: field for name, field in vars(self).items() if field is not None}


@dataclass(frozen=True)
class RowScores:
    """The values by which the token of a row is chosen, after the heads.

    ``scores``: f32 [B, n] of the target ids int64 [B, n] ``ids``; None: of all draft ids.
    """

    scores: Tensor
    ids: Tensor | None = None


class BlockHeads:
    """The sequential heads of a block draft, and the choice of its tokens."""

    def __init__(
        self,
        manifest: BlockManifest,
        weights: Mapping[str, Tensor],
        target_ids: Callable[[Tensor], Tensor],
    ) -> None:
        """Create them.

        ``weights``: by canonical name, of the compute type. ``target_ids``: maps draft ids to
        target ids.
        """
        self._manifest = manifest
        self._weights = weights
        self._target_ids = target_ids
        # the anchor's row, if it only advances the markov head's state
        self._num_skipped = 1 - manifest.first_head_row if not manifest.anchor_row else 0

    def continuation(
        self, roots: Tensor, lengths: Tensor, sampling: DraftSampling | None
    ) -> tuple[Continuation, dict[str, Tensor]]:
        """Return ``choose`` without a grammar as work after a block's graph, and its tensors."""
        drawn = {} if sampling is None else vars(sampling)

        def choose(
            outputs: Mapping[str, Tensor], further: Mapping[str, Tensor]
        ) -> dict[str, Tensor]:
            own = DraftSampling(**{name: further[name] for name in drawn}) if drawn else None
            found = self.choose(outputs, further["roots"], further["lengths"], own, None)
            return found.fields()

        name = "drawn tokens" if drawn else "likeliest tokens"
        return Continuation(name, choose), {"roots": roots, "lengths": lengths, **drawn}

    def choose(
        self,
        outputs: Mapping[str, Tensor],
        roots: Tensor,
        lengths: Tensor,
        sampling: DraftSampling | None,
        allowed: DraftFilter | None,
    ) -> BlockDrafts:
        """Choose the tokens of a block.

        Args:
            outputs: ``logits`` f32 [B, R, Vd], and ``hidden`` [B, R, Hd] if a head reads it.
            roots: int64 [B], the anchors. lengths: int32 [B], their sequence indices.
            sampling: None if all sequences are greedy. allowed: masks tokens that grammars forbid.
        """
        logits, hidden = outputs["logits"], outputs.get("hidden")
        count = logits.shape[1] - self._num_skipped
        indices = lengths.long()[:, None] + torch.arange(1, count + 1, device=lengths.device)
        if not self._manifest.has_sequential_head and allowed is None:
            return self._chosen(logits, indices, sampling)
        rows = self.walk(logits, hidden, roots, indices, sampling, allowed)
        return _joined(drafts for _, drafts in rows)

    def _chosen(
        self, logits: Tensor, indices: Tensor, sampling: DraftSampling | None
    ) -> BlockDrafts:
        """Choose tokens of independent rows: ``logits`` f32 [B, N, Vd]."""
        if sampling is None:
            return BlockDrafts(self._target_ids(logits.argmax(dim=2)))
        ids, candidates, probs = sampling.draw(logits, indices)
        return BlockDrafts(self._target_ids(ids), self._target_ids(candidates), probs)

    def walk(
        self,
        logits: Tensor,
        hidden: Tensor | None,
        roots: Tensor,
        indices: Tensor,
        sampling: DraftSampling | None,
        allowed: DraftFilter | None,
    ) -> Iterator[tuple[RowScores, BlockDrafts]]:
        """Yield the scores and the drafts of each row, from left to right.

        Arguments: as for ``choose``, with ``outputs`` by one.
        """
        m, before = self._manifest, roots
        num_skipped = self._num_skipped
        markov = _Markov(m, self._weights) if m.markov else None
        selector = None
        if m.selector_rank and allowed is None:  # candidates do not depend on the tokens before
            selector = _Selector(m, self._weights, logits, hidden, self._target_ids)
        for row in range(logits.shape[1]):
            scores = logits[:, row]
            if markov is not None:
                scores = scores + markov.correction(
                    before, None if hidden is None else hidden[:, row]
                )
            if row < num_skipped:  # the anchor's row only advances the markov head's state
                continue
            i = row - num_skipped
            if allowed is not None:
                scores = _allowed(allowed, scores, before, i)
            if m.selector_rank:
                at, place = (selector, row) if selector else (self._select(scores, hidden, row), 0)
                row_scores = RowScores(at.scores(place, before), at.ids[:, place])
                found = self._of_candidates(row_scores, indices[:, i : i + 1], sampling)
            else:
                row_scores = RowScores(scores)
                found = self._chosen(scores[:, None], indices[:, i : i + 1], sampling)
            before = found.tokens[:, 0]
            yield row_scores, found

    def _select(self, scores: Tensor, hidden: Tensor | None, row: int) -> _Selector:
        """Return the selector over one row's ``scores`` f32 [B, Vd]."""
        assert hidden is not None
        rows = scores[:, None], hidden[:, row : row + 1]
        return _Selector(self._manifest, self._weights, *rows, self._target_ids)

    def _of_candidates(
        self, row: RowScores, indices: Tensor, sampling: DraftSampling | None
    ) -> BlockDrafts:
        """Choose a token of a row's candidates; ``indices`` int64 [B, 1]."""
        assert row.ids is not None
        scores, ids = row.scores[:, None], row.ids
        if sampling is None:
            return BlockDrafts(ids.gather(1, scores.argmax(dim=2)))
        places, candidates, probs = sampling.draw(scores, indices)
        found = ids.gather(1, candidates[:, 0])[:, None]
        return BlockDrafts(ids.gather(1, places), found, probs)

    def confidence(self, before: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Return the confidence f32 [B, N] of the drafts after tokens ``before`` [B, N].

        None without a confidence head. Decoding does not use it; ``validate`` compares it.
        ``hidden``: [B, R, Hd].
        """
        head, w = self._manifest.confidence, self._weights
        if head is None:
            return None
        assert hidden is not None
        count = before.shape[1]
        x = hidden[:, hidden.shape[1] - count :]
        if head.with_markov:
            x = torch.cat([x, w["markov_head.markov_w1.weight"][before]], dim=2)
        logit = x @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
        if head.temperatures:
            tau = [head.temperatures[i] for i in range(count)]
            logit = torch.stack([logit[:, i].float() / t for i, t in enumerate(tau)], dim=1)
        return torch.sigmoid(logit.float())


def _joined(parts: Iterator[BlockDrafts]) -> BlockDrafts:
    """Join the drafts of rows, each [B, 1, ...]."""
    fields = [part.fields() for part in parts]
    return BlockDrafts.of({name: torch.cat([f[name] for f in fields], dim=1) for name in fields[0]})


def _allowed(allowed: DraftFilter, scores: Tensor, before: Tensor, draft: int) -> Tensor:
    """Mask forbidden tokens in ``scores`` f32 [B, Vd] of a draft after tokens ``before`` [B]."""
    if draft == 0:
        return allowed.first(scores[:, None])[:, 0]
    no_parent = torch.zeros(1, dtype=torch.int64)
    return allowed.level(scores[:, None], before[:, None], no_parent)[:, 0]


class _Selector:
    """The candidates of n rows, and their scores after a token.

    ``ids``: int64 [B, n, K] target ids.
    """

    def __init__(
        self,
        manifest: BlockManifest,
        weights: Mapping[str, Tensor],
        logits: Tensor,
        hidden: Tensor | None,
        target_ids: Callable[[Tensor], Tensor],
    ) -> None:
        assert hidden is not None
        best = logits.topk(min(manifest.selector_top_k, logits.shape[2]), dim=2)
        self.ids = target_ids(best.indices)
        self._values = best.values
        prefix = "candidate_selector."
        self._projected = hidden @ weights[f"{prefix}hidden_projection.weight"].T  # [B, n, r]
        self._offered = weights[f"{prefix}successor_codebook"][self.ids]  # [B, n, K, r]
        self._predecessors = weights[f"{prefix}predecessor_codebook"]

    def scores(self, row: int, before: Tensor) -> Tensor:
        """Return the scores f32 [B, K] of the candidates of ``row`` after tokens ``before`` [B]."""
        sought = self._predecessors[before] * self._projected[:, row]
        bonus = (self._offered[:, row] @ sought[..., None])[..., 0]
        return self._values[:, row] + bonus.float()


class _Markov:
    """The markov head over one block, from left to right."""

    def __init__(self, manifest: BlockManifest, weights: Mapping[str, Tensor]) -> None:
        assert manifest.markov is not None
        self._form = manifest.markov.form
        self._weights = weights
        self._state: Tensor | None = None  # [B, r]; None: zeros

    def correction(self, before: Tensor, hidden: Tensor | None) -> Tensor:
        """Return what the next row adds to its logits, f32 [B, Vd], after tokens ``before`` [B]."""
        e = self._weights["markov_head.markov_w1.weight"][before]
        latent = self._latent(e, hidden)
        return (latent @ self._weights["markov_head.markov_w2.weight"].T).float()

    def _latent(self, e: Tensor, hidden: Tensor | None) -> Tensor:
        if self._form == "vanilla":
            return e
        assert hidden is not None
        if self._form == "gated":
            return torch.sigmoid(self._projected("gate_proj", [hidden, e])) * e
        state = torch.zeros_like(e) if self._state is None else self._state
        gate, new, out = self._projected("joint_proj", [state, e, hidden]).chunk(3, dim=1)
        kept = torch.sigmoid(gate)
        self._state = kept * state + (1 - kept) * torch.tanh(new)
        return torch.tanh(out)

    def _projected(self, name: str, parts: list[Tensor]) -> Tensor:
        weight, bias = (self._weights[f"markov_head.{name}.{p}"] for p in ("weight", "bias"))
        return torch.cat(parts, dim=1) @ weight.T + bias
