"""MTP heads in plain PyTorch, written from the formula: the reference of their engine.

Shapes: T rows, n rows before them, H hidden, V vocab, R rows with logits, E experts, I their inner
width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from trt_eagle3.drafts.mtp.manifest import MtpManifest
from trt_eagle3.parity.ops import full_float32, pair_axis, rms_norm, turn
from trt_eagle3.parity.reference.dequantise import read_all
from trt_eagle3.parity.reference.draft import DraftRows, KeysValues, attend
from trt_eagle3.spec import SparseMoe

__all__ = ["MtpReference"]

_LAYER = "layers.0"


@dataclass(frozen=True)
class MtpReference:
    """Implements ``ReferenceDraft`` in ``dtype``. ``weights``: canonical name -> tensor."""

    manifest: MtpManifest
    weights: Mapping[str, Tensor]
    dtype: torch.dtype = torch.float64

    @classmethod
    def load(
        cls,
        manifest: MtpManifest,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> MtpReference:
        """Read the weights of ``manifest`` from its checkpoint."""
        return cls(manifest, read_all(manifest.tensors, dtype, device), dtype)

    def fuse(self, aux: Tensor) -> Tensor:
        """Compute features [T, H] from the target's hidden states [T, H]."""
        return self._norm(aux, "pre_fc_norm_hidden")

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
        """Run T rows after ``before``; see ``ReferenceDraft``."""
        found: dict[str, Tensor] = {}
        embedded = found["pre_fc_norm_embedding"] = self._norm(embeds, "pre_fc_norm_embedding")
        halves = (embedded, features.to(self.dtype))
        first = self.manifest.concat == "embedding_first"
        found["embedding_and_hidden"] = torch.cat(halves if first else halves[::-1], dim=-1)
        hidden = found["fc"] = self._linear(found["embedding_and_hidden"], "fc")
        name = f"{_LAYER}.input_layernorm"
        found[name] = self._norm(hidden, name)
        old = before[0] if before else None
        attended, new = self._attention(found[name], positions, mask, old, found)
        hidden = found[f"{_LAYER}.attention_residual"] = hidden + attended
        name = f"{_LAYER}.post_attention_layernorm"
        found[name] = self._norm(hidden, name)
        found[f"{_LAYER}.mlp.output"] = self._mlp(found[name])
        hidden = found[f"{_LAYER}.output"] = hidden + found[f"{_LAYER}.mlp.output"]
        final = found["norm"] = self._norm(hidden, "norm")
        wanted = final if logit_rows is None else final[logit_rows.to(final.device)]
        next_hidden = hidden if self.manifest.feedback == "pre_norm" else final
        return DraftRows(self._linear(wanted, "lm_head"), self.fuse(next_hidden), [new], found)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """Compute ``x / rms(x) * (offset + weight)``."""
        m = self.manifest
        weight = self.weights[f"{name}.weight"].to(self.dtype) + m.norm_offset
        return rms_norm(x, weight, m.rms_norm_eps, self.dtype)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x.to(self.dtype) @ self.weights[f"{name}.weight"].to(self.dtype).T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.to(self.dtype)

    def _attention(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        before: tuple[Tensor, Tensor] | None,
        found: dict[str, Tensor],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute the layer's attention [T, H], and its keys and values."""
        spec, prefix = self.manifest.attention, f"{_LAYER}.self_attn"
        q, k, v = (self._linear(x, f"{prefix}.{p}_proj") for p in "qkv")
        found[f"{prefix}.qkv"] = torch.cat([q, k, v], dim=-1)
        heads = q.unflatten(-1, (spec.num_heads, -1))
        q, gate = heads.split([spec.head_dim, heads.shape[-1] - spec.head_dim], dim=-1)
        k, v = (y.unflatten(-1, (spec.num_kv_heads, -1)) for y in (k, v))
        if spec.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        q, k = (self._turn(y, positions.to(x.device)) for y in (q, k))
        found[f"{prefix}.q"], found[f"{prefix}.k"] = q.flatten(1), k.flatten(1)
        scale = spec.rope.attention_scaling**2 / spec.head_dim**0.5
        out = found[f"{prefix}.out"] = attend(q, k, v, mask, before, scale)
        if spec.output_gate:
            out = found[f"{prefix}.gated"] = out * gate.flatten(1).sigmoid()
        found[f"{prefix}.output"] = self._linear(out, f"{prefix}.o_proj")
        return found[f"{prefix}.output"], (k, v)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first channels of each head of ``x [T, heads, D]``."""
        rope = self.manifest.attention.rope
        pairs = len(rope.inv_freq)
        inv_freq = torch.tensor(rope.inv_freq, device=x.device)
        axes = pair_axis(rope.layout, rope.sections, pairs)
        turned = turn(x[..., : 2 * pairs], positions, inv_freq, axes, self.dtype)
        return torch.cat([turned, x[..., 2 * pairs :]], dim=-1)

    def _mlp(self, x: Tensor) -> Tensor:
        spec, prefix = self.manifest.layer.mlp, f"{_LAYER}.mlp"
        if not isinstance(spec, SparseMoe):
            return self._swiglu(x, prefix)
        routed = self._experts(x, spec, prefix)
        if not spec.shared_expert_width:
            return routed
        opened = self._linear(x, f"{prefix}.shared_expert_gate").sigmoid()
        return routed + opened * self._swiglu(x, f"{prefix}.shared_expert")

    def _swiglu(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = (self._linear(x, f"{prefix}.{p}_proj") for p in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{prefix}.down_proj")

    def _experts(self, x: Tensor, spec: SparseMoe, prefix: str) -> Tensor:
        """Run each row through its best experts, weighted by their probabilities."""
        best = self._linear(x, f"{prefix}.gate").softmax(-1).topk(spec.top_k, dim=-1)
        total = best.values.sum(-1, keepdim=True) if spec.renormalise else 1.0
        gate_up, down = (
            self.weights[f"{prefix}.experts.{p}_proj"].to(self.dtype)[best.indices]
            for p in ("gate_up", "down")
        )  # [T, k, 2 I, H] and [T, k, H, I]
        gate, up = torch.einsum("tkih,th->tki", gate_up, x).chunk(2, dim=-1)
        out = torch.einsum("tkhi,tki->tkh", down, silu(gate) * up)
        return (out * (best.values / total)[..., None]).sum(1)
