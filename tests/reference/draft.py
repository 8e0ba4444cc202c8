"""EAGLE-3 drafts in plain PyTorch, written from the equations: no cache, every call recomputes all rows.

Equations: EAGLE-3 (arXiv 2503.01840) and the variants of ``DraftManifest``. Shapes: T rows, k aux states, Ht target
hidden, Hd draft hidden, Vd draft vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.reference.ops import pair_axis, rms_norm, turn
from trt_eagle3.checkpoint.manifest import DraftManifest


@dataclass(frozen=True)
class ReferenceDraft:
    """A draft in float64. ``weights``: canonical name -> tensor."""

    manifest: DraftManifest
    weights: Mapping[str, Tensor]

    def fuse(self, aux: Tensor) -> Tensor:
        """Features [T, Hd] of concatenated aux hidden states [T, k * Ht]."""
        m = self.manifest
        if m.norm_before_fc:
            aux = self._norm(aux, "input_norm")
        if m.fc_norm:
            parts = aux.split(m.target_hidden_size, dim=-1)
            aux = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
        return self._linear(aux, "fc", m.fc_bias)

    def forward(self, embeds: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, Vd] and the features [T, Hd] that each row feeds to the next.

        Args:
            embeds: [T, Hd] of the tokens one ahead. features: [T, Hd]. positions: [3, T].
            mask: bool [T, T]: which rows each row sees, itself included.
        """
        m = self.manifest
        embeds, features = embeds.double(), features.double()
        inner = self._norm(features, "layers.0.input_layernorm") if m.first_norm == "double" else features
        normed = self._norm(inner, "layers.0.hidden_norm")
        x = torch.cat([self._norm(embeds, "layers.0.input_layernorm"), normed], dim=-1)
        hidden = normed if m.residual == "normed" else features
        for layer in range(m.num_layers):
            if layer > 0:
                x = self._norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = hidden + self._attention(x, f"layers.{layer}.self_attn", positions, mask)
            hidden = hidden + self._mlp(self._norm(hidden, f"layers.{layer}.post_attention_layernorm"), layer)
        final = self._norm(hidden, "norm")
        return final @ self.weights["lm_head.weight"].double().T, hidden if m.feedback == "pre_norm" else final

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.manifest.rms_norm_eps)

    def _linear(self, x: Tensor, name: str, bias: bool) -> Tensor:
        y = x.double() @ self.weights[f"{name}.weight"].double().T
        return y + self.weights[f"{name}.bias"].double() if bias else y

    def _attention(self, x: Tensor, prefix: str, positions: Tensor, mask: Tensor) -> Tensor:
        m = self.manifest
        q, k, v = (self._linear(x, f"{prefix}.{p}_proj", m.attention_bias) for p in "qkv")
        q, k, v = (y.unflatten(-1, (-1, m.head_dim)) for y in (q, k, v))
        if m.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        axes = pair_axis(m.rope.layout, m.rope.sections, m.head_dim // 2)
        inv_freq, factor = torch.tensor(m.rope.inv_freq), m.rope.attention_scaling
        q, k = (turn(y, positions, inv_freq, axes) * factor for y in (q, k))
        k, v = (y.repeat_interleave(m.num_heads // m.num_kv_heads, dim=1) for y in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / m.head_dim**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
        return self._linear(mixed, f"{prefix}.o_proj", m.attention_bias)

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        prefix, bias = f"layers.{layer}.mlp", self.manifest.mlp_bias
        gate, up = (self._linear(x, f"{prefix}.{p}_proj", bias) for p in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{prefix}.down_proj", bias)
