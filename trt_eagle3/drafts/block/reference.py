"""Block drafts in plain PyTorch, written from their equations: the reference of their engine.

Equations: DFlash (arXiv 2602.06036), its convolutions and candidate selector (DFlash2), DSpark's
markov and confidence heads. Shapes: T context rows, n rows of the block, m drafts, k aux states, Ht
target hidden, Hd draft hidden, D head, V target vocabulary, Vd draft vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from trt_eagle3.drafts.block.manifest import BlockManifest
from trt_eagle3.parity.ops import full_float32, pair_axis, rms_norm, turn
from trt_eagle3.parity.reference.dequantise import read_all
from trt_eagle3.parity.reference.draft import KeysValues

__all__ = ["BlockProposal", "BlockReference", "BlockRows"]


@dataclass(frozen=True)
class BlockRows:
    """The outputs of a block of n rows.

    Attributes:
        hidden: [n, Hd], after the final norm.
        logits: [n, Vd], after multiplier and softcap, before the sequential heads.
        intermediates: tensors [n, ...] by name, in order of computation.
    """

    hidden: Tensor
    logits: Tensor
    intermediates: Mapping[str, Tensor]


@dataclass(frozen=True)
class BlockProposal:
    """The m tokens drafted by a block.

    Attributes:
        tokens: target ids.
        scores: [m, Vd], logits after the sequential head; -inf where the selector has no candidate.
        all_scores: [m, Vd], the same of every token, candidate or not.
        q: [m, V], the distribution that each token was drawn from; None if greedy.
        confidence: [m], estimated probability that a draft is accepted if those before it are; None
            without the head.
    """

    tokens: tuple[int, ...]
    scores: Tensor
    all_scores: Tensor
    q: Tensor | None
    confidence: Tensor | None


@dataclass(frozen=True)
class BlockReference:
    """A draft, computed in ``dtype``. ``weights``: canonical name -> tensor."""

    manifest: BlockManifest
    weights: Mapping[str, Tensor]
    dtype: torch.dtype = torch.float64

    @classmethod
    def load(
        cls,
        manifest: BlockManifest,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        embedding: Tensor | None = None,
    ) -> BlockReference:
        """Read the weights of ``manifest``. The vocabulary map stays on the CPU.

        ``embedding``: the target's table [V, Hd], for a draft without one. Without a table, ``run``
        still works.
        """
        weights = read_all(manifest.tensors, dtype, device)
        if embedding is not None and manifest.embedding == "target":
            weights["embed_tokens.weight"] = embedding.to(device, dtype)
        return cls(manifest, weights, dtype)

    @torch.no_grad()
    @full_float32()
    def context(self, aux: Tensor, first: int = 0) -> KeysValues:
        """Compute keys and values of committed rows for each layer.

        Args:
            aux: [T, k * Ht], concatenated aux states of the target.
            first: sequence index of the first row.
        Returns:
            per layer keys [T, Hkv, D], rotated, and values [T, Hkv, D].
        """
        rows = self._norm(self._linear(aux, "fc"), "hidden_norm")
        return [self._keys_values(rows, layer, first) for layer in range(self.manifest.num_layers)]

    def block(self, anchor: int, position: int, num_rows: int, context: KeysValues) -> BlockRows:
        """Run the block of ``num_rows`` rows whose ``anchor`` token has index ``position``."""
        return self.run(self.embed(anchor, num_rows), position, context)

    def embed(self, anchor: int, num_rows: int) -> Tensor:
        """Return the input [n, Hd] of a block: the anchor's embedding, then the mask's."""
        m, table = self.manifest, self._weight("embed_tokens.weight")
        mask = (
            table[m.mask_token_id]
            if m.mask_embedding == "token"
            else self._weight("mask_embedding")
        )
        return torch.cat([table[anchor][None], mask.expand(num_rows - 1, -1)]) * m.embedding_scale

    @torch.no_grad()
    @full_float32()
    def run(self, embeds: Tensor, position: int, context: KeysValues) -> BlockRows:
        """Run the rows ``embeds`` [n, Hd] at indices ``position``, ``position + 1``, ...

        They see the rows of ``context`` before ``position``, and each other.
        """
        found: dict[str, Tensor] = {}
        x = embeds.to(self.dtype)
        for layer in range(self.manifest.num_layers):
            x = self._layer(x, layer, position, context[layer], found)
        hidden = found["norm"] = self._norm(x, "norm")
        return BlockRows(hidden, self._logits(hidden), found)

    @torch.no_grad()
    @full_float32()
    def propose(
        self,
        anchor: int,
        rows: BlockRows,
        draw: Callable[[int, Tensor], int] | None = None,
        temperature: float = 1.0,
    ) -> BlockProposal:
        """Choose tokens from left to right; each may depend on the one before.

        Args:
            anchor: the token before the first draft.
            draw: chooses a token from the index of its draft and q [V], the softmax of its scores
                over ``temperature``; None: the token of the highest score.
        """
        m, offset = self.manifest, 0 if self.manifest.anchor_row else 1
        previous, state = anchor, self._first_state(anchor, rows)
        tokens: list[int] = []
        scores: list[Tensor] = []
        whole: list[Tensor] = []
        drawn: list[Tensor] = []
        confidence: list[Tensor] = []
        for draft, (hidden, logits) in enumerate(
            zip(rows.hidden[offset:], rows.logits[offset:], strict=True)
        ):
            if m.confidence is not None:
                confidence.append(self._confidence(hidden, previous, draft))
            if m.markov is not None:
                latent, state = self._latent(hidden, previous, state)
                logits = logits + self._weight("markov_head.markov_w2.weight") @ latent
            whole.append(logits)
            if m.selector_top_k:
                best = logits.topk(m.selector_top_k).indices
                whole[-1] = logits + self._selector_bonus(hidden, previous)
                logits = torch.full_like(logits, -torch.inf).scatter(0, best, whole[-1][best])
            scores.append(logits)
            if draw is None:
                previous = int(self._target_ids()[logits.argmax()])
            else:
                q = torch.zeros(m.vocab_size, dtype=self.dtype, device=logits.device)
                q[self._target_ids()] = (logits / temperature).softmax(-1)
                previous = draw(draft, q)
                drawn.append(q)
            tokens.append(previous)
        return BlockProposal(
            tuple(tokens),
            torch.stack(scores),
            torch.stack(whole),
            torch.stack(drawn) if drawn else None,
            torch.stack(confidence) if confidence else None,
        )

    # ---- layers

    def _layer(
        self,
        x: Tensor,
        layer: int,
        position: int,
        context: tuple[Tensor, Tensor],
        found: dict[str, Tensor],
    ) -> Tensor:
        """Return the residual [n, Hd] after a layer."""
        name = f"layers.{layer}"

        def attend(rows: Tensor) -> Tensor:
            return self._attention(rows, layer, position, context, found)

        normed = found[f"{name}.input_layernorm"] = self._norm(x, f"{name}.input_layernorm")
        x = found[f"{name}.attention_residual"] = x + self._convolved(
            normed, f"{name}.attention_conv", attend
        )
        normed = found[f"{name}.post_attention_layernorm"] = self._norm(
            x, f"{name}.post_attention_layernorm"
        )

        def mix(rows: Tensor) -> Tensor:
            return self._mlp(rows, layer, found)

        x = found[f"{name}.output"] = x + self._convolved(normed, f"{name}.mlp_conv", mix)
        return x

    def _convolved(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a sublayer between its two convolutions, if the draft has them."""
        taps, group = self.manifest.conv_kernel, self.manifest.conv_group
        if not taps:
            return sublayer(x)
        dynamic = self._linear(x, f"{name}.kernel_projection").unflatten(-1, (2, taps, -1))
        dynamic = dynamic.repeat_interleave(group, dim=-1)  # [n, 2, taps, Hd]
        kernels = self._weight(f"{name}.base_kernel") + dynamic
        return _convolve(sublayer(_convolve(x, kernels[:, 0])), kernels[:, 1])

    def _attention(
        self,
        x: Tensor,
        layer: int,
        position: int,
        context: tuple[Tensor, Tensor],
        found: dict[str, Tensor],
    ) -> Tensor:
        m, prefix = self.manifest, f"layers.{layer}.self_attn"
        q = self._heads(x, f"{prefix}.q", position)
        own = self._keys_values(x, layer, position)
        found[f"{prefix}.q"], found[f"{prefix}.k"] = q.flatten(1), own[0].flatten(1)
        k, v = (
            torch.cat(pair).repeat_interleave(m.num_heads // m.num_kv_heads, dim=1)
            for pair in zip(context, own, strict=True)
        )
        scores = torch.einsum("ihd,jhd->hij", q, k)
        scores = scores * m.rope.attention_scaling**2 / m.head_dim**0.5
        seen = self._seen(layer, position, len(context[0]), len(x)).to(x.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
        out = found[f"{prefix}.out"] = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        found[f"{prefix}.output"] = self._linear(out, f"{prefix}.o_proj")
        return found[f"{prefix}.output"]

    def _seen(self, layer: int, position: int, num_context: int, num_rows: int) -> Tensor:
        """Return bool [n, T + n]: the context rows and block rows that each row sees."""
        spec = self.manifest.layers[layer]
        query = (position + torch.arange(num_rows))[:, None]
        before = torch.arange(num_context)
        context = (before < position).expand(num_rows, -1)
        own = query >= query.T if spec.causal else torch.ones(num_rows, num_rows, dtype=torch.bool)
        if spec.window and self.manifest.window_rule == "row":
            context = context & (query - before < spec.window)
            own = own & ((query - query.T).abs() < spec.window)
        elif spec.window:
            context = context & (before >= position - spec.window)
        return torch.cat([context, own], dim=1)

    def _keys_values(self, x: Tensor, layer: int, first: int) -> tuple[Tensor, Tensor]:
        prefix = f"layers.{layer}.self_attn"
        v = self._linear(x, f"{prefix}.v_proj").unflatten(-1, (-1, self.manifest.head_dim))
        return self._heads(x, f"{prefix}.k", first), v

    def _heads(self, x: Tensor, name: str, first: int) -> Tensor:
        """Return queries or keys [n, heads, D], normed and rotated from index ``first`` on."""
        rope, head_dim = self.manifest.rope, self.manifest.head_dim
        heads = self._norm(
            self._linear(x, f"{name}_proj").unflatten(-1, (-1, head_dim)), f"{name}_norm"
        )
        positions = (first + torch.arange(len(x), device=x.device)).expand(3, -1)
        pairs = len(rope.inv_freq)
        inv_freq = torch.tensor(rope.inv_freq, device=x.device)
        axes = pair_axis(rope.layout, rope.sections, pairs)
        turned = turn(heads[..., : 2 * pairs], positions, inv_freq, axes, self.dtype)
        return torch.cat([turned, heads[..., 2 * pairs :]], dim=-1)

    def _mlp(self, x: Tensor, layer: int, found: dict[str, Tensor]) -> Tensor:
        prefix = f"layers.{layer}.mlp"
        gate, up = (self._linear(x, f"{prefix}.{p}_proj") for p in ("gate", "up"))
        found[f"{prefix}.output"] = self._linear(silu(gate) * up, f"{prefix}.down_proj")
        return found[f"{prefix}.output"]

    def _logits(self, hidden: Tensor) -> Tensor:
        m = self.manifest
        logits = self._linear(hidden, "lm_head") * m.logit_multiplier
        return m.logit_softcap * (logits / m.logit_softcap).tanh() if m.logit_softcap else logits

    # ---- sequential heads

    def _target_ids(self) -> Tensor:
        """Return the target id of each id of the draft's vocabulary, int64 [Vd]."""
        ids = torch.arange(self.manifest.draft_vocab_size)
        return ids + self.weights["d2t"] if "d2t" in self.weights else ids

    def _first_state(self, anchor: int, rows: BlockRows) -> Tensor | None:
        """Return the rnn head's state [r] before the first draft."""
        markov = self.manifest.markov
        if markov is None or markov.form != "rnn":
            return None
        state = rows.hidden.new_zeros(markov.rank)
        if self.manifest.anchor_row or not markov.state_from_anchor:
            return state
        return self._latent(rows.hidden[0], anchor, state)[1]

    def _latent(
        self, hidden: Tensor, previous: int, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the markov head's latent [r] after a token, and the rnn's next state."""
        markov = self.manifest.markov
        assert markov is not None
        embedded = self._weight("markov_head.markov_w1.weight")[previous]
        if markov.form == "vanilla":
            return embedded, None
        if markov.form == "gated":
            gate = self._linear(torch.cat([hidden, embedded]), "markov_head.gate_proj").sigmoid()
            return gate * embedded, None
        assert state is not None
        mixed = self._linear(torch.cat([state, embedded, hidden]), "markov_head.joint_proj")
        keep, candidate, out = mixed.chunk(3)
        keep = keep.sigmoid()
        return out.tanh(), keep * state + (1 - keep) * candidate.tanh()

    def _confidence(self, hidden: Tensor, previous: int, draft: int) -> Tensor:
        """Return the confidence, a scalar, of a draft after the token ``previous``."""
        head = self.manifest.confidence
        assert head is not None
        if head.with_markov:
            embedded = self._weight("markov_head.markov_w1.weight")[previous]
            hidden = torch.cat([hidden, embedded])
        logit = self._linear(hidden, "confidence_head.proj")[0]
        return (logit / (head.temperatures[draft] if head.temperatures else 1.0)).sigmoid()

    def _selector_bonus(self, hidden: Tensor, previous: int) -> Tensor:
        """Return what the selector adds to the logits [Vd] of a row after a token."""
        prefix = "candidate_selector"
        context = self._weight(f"{prefix}.predecessor_codebook")[previous] * self._linear(
            hidden, f"{prefix}.hidden_projection"
        )
        successors = self._weight(f"{prefix}.successor_codebook")
        return (successors @ context)[self._target_ids()]

    # ---- weights

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.manifest.rms_norm_eps, self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x.to(self.dtype) @ self._weight(f"{name}.weight").T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.to(self.dtype)


def _convolve(x: Tensor, kernels: Tensor) -> Tensor:
    """Sum taps of the rows ``x`` [n, Hd] by ``kernels`` [n, taps, Hd], zero before the block."""
    taps = kernels.shape[1]
    padded = pad(x, (0, 0, taps - 1, 0))
    parts = (kernels[:, tap] * padded[taps - 1 - tap :][: len(x)] for tap in range(taps))
    return torch.stack(list(parts)).sum(0)
