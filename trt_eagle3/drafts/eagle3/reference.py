"""EAGLE-3 drafts in plain PyTorch, written from the equations: the reference of a draft engine.

Equations: EAGLE-3 (arXiv 2503.01840) and the variants of ``Eagle3Manifest``. Shapes: T rows, n rows
before them, k aux states, Ht target hidden, Hd draft hidden, Vd draft vocab, R rows with logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.parity.ops import full_float32, pair_axis, rms_norm, turn
from trt_eagle3.parity.reference.dequantise import read_all
from trt_eagle3.parity.reference.draft import DraftRows, KeysValues, attend

__all__ = ["Eagle3Reference"]


@dataclass(frozen=True)
class Eagle3Reference:
    """A draft, computed in ``dtype``. ``weights``: canonical name -> tensor."""

    manifest: Eagle3Manifest
    weights: Mapping[str, Tensor]
    dtype: torch.dtype = torch.float64

    @classmethod
    def load(
        cls,
        manifest: Eagle3Manifest,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Eagle3Reference:
        """Read the weights of ``manifest``. The vocabulary map stays on the CPU."""
        wanted = {n: ref for n, ref in manifest.tensors.items() if n != "embed_tokens.weight"}
        return cls(manifest, read_all(wanted, dtype, device), dtype)

    @full_float32()
    def fuse(self, aux: Tensor) -> Tensor:
        """Compute features [T, Hd] from concatenated aux hidden states [T, k * Ht]."""
        m = self.manifest
        if m.norm_before_fc:
            aux = self._norm(aux, "input_norm")
        if m.fc_norm:
            parts = aux.split(m.target_hidden_size, dim=-1)
            aux = torch.cat(
                [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1
            )
        return self._linear(aux, "fc", m.fc_bias)

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute logits [T, Vd] and features [T, Hd] of rows under attention ``mask [T, T]``."""
        found = self.run(embeds, features, positions, mask)
        return found.logits, found.features

    @torch.no_grad()
    @full_float32()
    def run(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        before: KeysValues = (),
        logit_rows: Tensor | None = None,
    ) -> DraftRows:
        """Run T rows after ``before``.

        Args:
            embeds: [T, Hd], embeddings of the tokens one ahead.
            features: [T, Hd].
            positions: [3, T].
            mask: bool [T, n + T]: the rows that each row attends to, itself included; those of
                ``before`` come first.
            logit_rows: int64 [R], rows to compute logits of; None: all rows.
        """
        m = self.manifest
        embeds, features = embeds.to(self.dtype), features.to(self.dtype)
        intermediates: dict[str, Tensor] = {}
        x, normed = self._first_inputs(embeds, features, intermediates)
        hidden = normed if m.residual == "normed" else features
        memory = []
        for layer in range(m.num_layers):
            if layer > 0:
                x = self._norm(hidden, f"layers.{layer}.input_layernorm")
            old = before[layer] if before else None
            hidden, new = self._layer(layer, x, hidden, positions, mask, old, intermediates)
            memory.append(new)
        final = intermediates["norm"] = self._norm(hidden, "norm")
        wanted = final if logit_rows is None else final[logit_rows.to(final.device)]
        logits = wanted @ self._weight("lm_head.weight").T
        fed_back = hidden if m.feedback == "pre_norm" else final
        return DraftRows(logits, fed_back, memory, intermediates)

    def _first_inputs(
        self, embeds: Tensor, features: Tensor, intermediates: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer, [T, 2 * Hd], and the normed features in it."""
        double = self.manifest.first_norm == "double"
        inner = self._norm(features, "layers.0.input_layernorm") if double else features
        normed = intermediates["hidden_norm"] = self._norm(inner, "layers.0.hidden_norm")
        x = torch.cat([self._norm(embeds, "layers.0.input_layernorm"), normed], dim=-1)
        intermediates["embedding_and_hidden"] = x
        return x, normed

    def _layer(
        self,
        layer: int,
        x: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        before: tuple[Tensor, Tensor] | None,
        intermediates: dict[str, Tensor],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the residual ``hidden`` after one layer, and its keys and values."""
        name = f"layers.{layer}"
        attended, new = self._attention(
            x, f"{name}.self_attn", positions, mask, before, intermediates
        )
        hidden = intermediates[f"{name}.attention_residual"] = hidden + attended
        post = f"{name}.post_attention_layernorm"
        normed = intermediates[post] = self._norm(hidden, post)
        mixed = intermediates[f"{name}.mlp.output"] = self._mlp(normed, layer)
        hidden = intermediates[f"{name}.output"] = hidden + mixed
        return hidden, new

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.manifest.rms_norm_eps, self.dtype)

    def _linear(self, x: Tensor, name: str, bias: bool) -> Tensor:
        y = x.to(self.dtype) @ self._weight(f"{name}.weight").T
        return y + self._weight(f"{name}.bias") if bias else y

    def _attention(
        self,
        x: Tensor,
        prefix: str,
        positions: Tensor,
        mask: Tensor,
        before: tuple[Tensor, Tensor] | None,
        intermediates: dict[str, Tensor],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        m = self.manifest
        q, k, v = (self._linear(x, f"{prefix}.{p}_proj", m.attention_bias) for p in "qkv")
        intermediates[f"{prefix}.qkv"] = torch.cat([q, k, v], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, m.head_dim)) for y in (q, k, v))
        if m.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        axes = pair_axis(m.rope.layout, m.rope.sections, m.head_dim // 2)
        inv_freq = torch.tensor(m.rope.inv_freq, device=x.device)
        q, k = (turn(y, positions.to(x.device), inv_freq, axes, self.dtype) for y in (q, k))
        intermediates[f"{prefix}.q"], intermediates[f"{prefix}.k"] = q.flatten(1), k.flatten(1)
        scale = m.rope.attention_scaling**2 / m.head_dim**0.5
        mixed = intermediates[f"{prefix}.out"] = attend(q, k, v, mask, before, scale)
        intermediates[f"{prefix}.output"] = self._linear(
            mixed, f"{prefix}.o_proj", m.attention_bias
        )
        return intermediates[f"{prefix}.output"], (k, v)

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        prefix, bias = f"layers.{layer}.mlp", self.manifest.mlp_bias
        gate, up = (self._linear(x, f"{prefix}.{p}_proj", bias) for p in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{prefix}.down_proj", bias)
