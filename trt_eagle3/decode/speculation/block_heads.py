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

__all__ = ["BlockDrafts", "BlockHeads", "RowScores"]


@dataclass(frozen=True)
class BlockDrafts:
    """The drafted tokens of a batch of blocks.

    Attributes:
        tokens: int64 [B, N] target ids.
        candidates: int64 [B, N, K] target ids and probs: float64 [B, N, K], the distributions that
            they were drawn from; None if all are the likeliest.
        confidence: f32 [B, N] estimated acceptance of each; None without a confidence head.
    """

    tokens: Tensor
    candidates: Tensor | None
    probs: Tensor | None
    confidence: Tensor | None


@dataclass(frozen=True)
class RowScores:
    """The values by which the token of a row is chosen, after the heads.

    ``scores``: f32 [B, n] of the draft ids int64 [B, n] ``ids``; None: of all draft ids.
    """

    scores: Tensor
    ids: Tensor | None


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

    def choose(
        self,
        logits: Tensor,
        hidden: Tensor | None,
        roots: Tensor,
        indices: Tensor,
        sampling: DraftSampling | None,
        allowed: DraftFilter | None,
    ) -> BlockDrafts:
        """Choose the tokens of a block.

        Args:
            logits: f32 [B, R, Vd]. hidden: [B, R, Hd]; None if no head reads it.
            roots: int64 [B], the anchors. indices: int64 [B, N] sequence index of each draft.
            sampling: None if all sequences are greedy. allowed: masks tokens that grammars forbid.
        """
        m = self._manifest
        if not m.has_sequential_head and m.confidence is None and allowed is None:
            return self._chosen(logits, indices, sampling)
        parts = [p for _, p in self.walk(logits, hidden, roots, indices, sampling, allowed)]
        fields = zip(*((p.tokens, p.candidates, p.probs, p.confidence) for p in parts), strict=True)
        joined = (None if f[0] is None else torch.cat(f, dim=1) for f in fields)
        return BlockDrafts(*joined)  # type: ignore[arg-type]  # tokens are never None

    def _chosen(
        self, logits: Tensor, indices: Tensor, sampling: DraftSampling | None
    ) -> BlockDrafts:
        """Choose tokens of independent rows: ``logits`` f32 [B, N, Vd]."""
        if sampling is None:
            return BlockDrafts(self._target_ids(logits.argmax(dim=2)), None, None, None)
        ids, candidates, probs = sampling.draw(logits, indices)
        return BlockDrafts(self._target_ids(ids), self._target_ids(candidates), probs, None)

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

        Arguments: as for ``choose``.
        """
        markov = _Markov(self._manifest, self._weights) if self._manifest.markov else None
        before, num_skipped = roots, logits.shape[1] - indices.shape[1]
        no_parent = torch.zeros(1, dtype=torch.int64)
        for row in range(logits.shape[1]):
            scores = logits[:, row]
            h = None if hidden is None else hidden[:, row]
            confidence = self._confidence(before, h, row - num_skipped)
            if markov is not None:
                scores = scores + markov.correction(before, h)
            if row < num_skipped:  # the anchor's row only advances the markov head's state
                continue
            i = row - num_skipped
            if allowed is not None:
                scores = scores[:, None]
                scores = (
                    allowed.level(scores, before[:, None], no_parent)
                    if i
                    else allowed.first(scores)
                )[:, 0]
            ids = None
            if self._manifest.selector_rank:
                scores, ids = self._selected(scores, before, h)
            found = self._of_row(scores, ids, indices[:, i : i + 1], sampling)
            before = found.tokens[:, 0]
            drafts = BlockDrafts(found.tokens, found.candidates, found.probs, confidence)
            yield RowScores(scores, ids), drafts

    def _of_row(
        self, scores: Tensor, ids: Tensor | None, indices: Tensor, sampling: DraftSampling | None
    ) -> BlockDrafts:
        """Choose a token by ``scores`` f32 [B, n] of ``ids`` [B, n], or of all draft ids."""
        if ids is None:
            return self._chosen(scores[:, None], indices, sampling)
        if sampling is None:
            best = scores.argmax(dim=1, keepdim=True)
            return BlockDrafts(self._target_ids(ids.gather(1, best)), None, None, None)
        places, candidates, probs = sampling.draw(scores[:, None], indices)
        found = self._target_ids(ids.gather(1, candidates[:, 0]))[:, None]
        return BlockDrafts(self._target_ids(ids.gather(1, places)), found, probs, None)

    def _selected(
        self, logits: Tensor, before: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the selector's scores f32 [B, K] of the likeliest tokens, and their draft ids."""
        assert hidden is not None
        w = self._weights
        best = logits.topk(min(self._manifest.selector_top_k, logits.shape[1]), dim=1)
        projected = hidden @ w["candidate_selector.hidden_projection.weight"].T
        wanted = w["candidate_selector.predecessor_codebook"][before] * projected
        offered = w["candidate_selector.successor_codebook"][self._target_ids(best.indices)]
        return best.values + (offered @ wanted[..., None])[..., 0].float(), best.indices

    def _confidence(self, before: Tensor, hidden: Tensor | None, place: int) -> Tensor | None:
        """Return the confidence of a row f32 [B, 1]; ``place``: of its draft in the block."""
        head = self._manifest.confidence
        if head is None or place < 0:
            return None
        assert hidden is not None
        x = hidden
        if head.with_markov:
            x = torch.cat([hidden, self._weights["markov_head.markov_w1.weight"][before]], dim=1)
        w = self._weights
        logit = x @ w["confidence_head.proj.weight"].T + w["confidence_head.proj.bias"]
        tau = head.temperatures[place] if place < len(head.temperatures) else 1.0
        return torch.sigmoid(logit.float() / tau)


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
