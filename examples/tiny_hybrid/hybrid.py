"""The tiny hybrid target (Qwen3.5) over padded batches, and its MTP head, in plain PyTorch.

The target is a ``Qwen3_5ForConditionalGeneration``; ``hybrid_forward`` runs its modules batched
over images and examples, as ``examples/tiny/model.py`` does. ``tests/test_tiny_hybrid.py`` compares
it with transformers.

# Shapes: B examples, L tokens, H hidden, R rows, Hv value heads, Dk and Dv channels of q and v
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from batch import Batch
from model import (
    EPS,
    HEAD_DIM,
    ROPE_THETA,
    DraftKeys,
    TargetOut,
    attend_later,
    embed,
    mlp,
    mrope,
    rotate,
)
from torch import Tensor, nn
from transformers import Qwen3_5Config, Qwen3VLConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

__all__ = ["AUX_LAYERS", "MtpHead", "hybrid_config", "hybrid_forward", "mtp_forward"]

LINEAR, FULL = "linear_attention", "full_attention"
LAYER_TYPES = [LINEAR, LINEAR, LINEAR, FULL] * 2
AUX_LAYERS = (1, 3, 5)  # of both kinds
PART, SECTIONS = 0.5, (6, 5, 5)  # half of a head's channels turn
ROTARY = int(HEAD_DIM * PART)
INNER = 224
LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}
CHUNK = 64  # rows of linear attention that are solved together


def hybrid_config(dense: Qwen3VLConfig) -> Qwen3_5Config:
    """The hybrid of the sizes of ``dense``, with its tower, without deepstack."""
    text, vision = dense.text_config, dense.vision_config
    same = (
        "attention_bias head_dim hidden_act hidden_size initializer_range max_position_embeddings "
        "num_attention_heads num_key_value_heads rms_norm_eps vocab_size"
    )
    tower = (
        "depth hidden_act hidden_size in_channels initializer_range intermediate_size num_heads "
        "num_position_embeddings out_hidden_size patch_size spatial_merge_size temporal_patch_size"
    )
    own = {
        "intermediate_size": INNER,
        "layer_types": LAYER_TYPES,
        "num_hidden_layers": len(LAYER_TYPES),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": PART,
            "mrope_section": list(SECTIONS),
            "mrope_interleaved": True,
        },
        **LINEAR_SIZES,
    }
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen3_5Config(
        text_config={key: getattr(text, key) for key in same.split()} | own,
        vision_config={key: getattr(vision, key) for key in tower.split()},
        tie_word_embeddings=False,
        **{key: getattr(dense, key) for key in ids},
    )


def _norm(x: Tensor, module: nn.Module) -> Tensor:
    """RMSNorm whose weight is stored less one, in float32."""
    weight = 1.0 + module.weight.float()
    return F.rms_norm(x.float(), (x.shape[-1],), weight, EPS).to(x.dtype)


def _gated_qkv(
    x: Tensor, attn: nn.Module, turned: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [B, heads, L, d] of full attention, q and k turned, and the output gate [B, L, q]."""
    q, gate = attn.q_proj(x).unflatten(-1, (-1, 2 * HEAD_DIM)).chunk(2, dim=-1)
    k, v = (p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (attn.k_proj, attn.v_proj))
    q, k = _norm(q, attn.q_norm).transpose(1, 2), _norm(k, attn.k_norm)
    parts = []
    for heads in (q, k):
        low, still = heads.split([ROTARY, HEAD_DIM - ROTARY], dim=-1)
        parts.append(torch.cat([rotate(low, *turned).to(v.dtype), still.to(v.dtype)], dim=-1))
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (parts[1], v))
    return parts[0], k, v, gate.flatten(2)


def _attention_output(mixed: Tensor, gate: Tensor, attn: nn.Module) -> Tensor:
    return attn.o_proj(mixed.transpose(1, 2).flatten(2) * gate.sigmoid())


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule along L, from no state, CHUNK rows at once (trt-eagle3's
    ``graph/ops/gated_delta.py`` has the equations).

    Args:
        q, k: [B, Hv, L, Dk] of length one; v: [B, Hv, L, Dv]; g, beta: [B, Hv, L]; float32.
    """
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    found = []
    for start in range(0, q.shape[2], CHUNK):
        q_c, k_c, v_c, g_c, beta_c = (x[:, :, start : start + CHUNK] for x in (q, k, v, g, beta))
        total, beta_c = g_c.cumsum(-1), beta_c[..., None]
        before = torch.ones(g_c.shape[-1], g_c.shape[-1], device=q.device).tril().bool()
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(~before, -torch.inf).exp()
        grown = total.exp()[..., None]
        u = torch.linalg.solve_triangular(
            beta_c * decay * (k_c @ k_c.mT),
            beta_c * (v_c - grown * (k_c @ state)),
            upper=False,
            unitriangular=True,
        )
        found.append(grown * (q_c @ state) + (decay * (q_c @ k_c.mT)) @ u)
        left = (total[..., -1:] - total).exp()[..., None]
        state = grown[..., -1:, :] * state + (left * k_c).mT @ u
    return torch.cat(found, dim=2)


def _delta_net(x: Tensor, m: Any) -> Tensor:
    """A layer's linear attention; its inner values are float32."""
    qkv, z = m.in_proj_qkv(x), m.in_proj_z(x)
    b, a = m.in_proj_b(x).float(), m.in_proj_a(x).float()
    with torch.autocast(x.device.type, enabled=False):
        padded = F.pad(qkv.float().transpose(1, 2), (m.conv_kernel_size - 1, 0))
        mixed = F.silu(F.conv1d(padded, m.conv1d.weight.float(), groups=m.conv_dim)).transpose(1, 2)
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        q, k = (t.unflatten(-1, (m.num_k_heads, m.head_k_dim)) for t in (q, k))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + EPS) for t in (q, k))
        ratio = m.num_v_heads // m.num_k_heads
        q, k = (t.repeat_interleave(ratio, dim=2).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (m.num_v_heads, m.head_v_dim)).transpose(1, 2)
        g = -m.A_log.float().exp() * F.softplus(a + m.dt_bias.float())
        gates = (t.transpose(1, 2) for t in (g, b.sigmoid()))
        heads = delta_rule(q * m.head_k_dim**-0.5, k, v, *gates).transpose(1, 2)
        normed = F.rms_norm(heads, (m.head_v_dim,), m.norm.weight.float(), EPS)
        gated = normed * F.silu(z.float().view_as(normed))
    return m.out_proj(gated.flatten(2).to(x.dtype))


def hybrid_forward(model: Any, batch: Batch, aux_layers: tuple[int, ...] = AUX_LAYERS) -> TargetOut:
    """Causal forward over right-padded rows; padding never reaches a real row."""
    decoder = model.model.language_model
    x, _ = embed(model, batch)
    embeds, aux = x, []
    turned = mrope(batch.positions, ROTARY, SECTIONS)
    for index, layer in enumerate(decoder.layers):
        h = _norm(x, layer.input_layernorm)
        if hasattr(layer, "linear_attn"):
            x = x + _delta_net(h, layer.linear_attn)
        else:
            q, k, v, gate = _gated_qkv(h, layer.self_attn, turned)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + _attention_output(mixed, gate, layer.self_attn)
        x = x + mlp(_norm(x, layer.post_attention_layernorm), layer.mlp)
        if index in aux_layers:
            aux.append(x)
    hidden = _norm(x, decoder.norm)
    return TargetOut(hidden, torch.cat(aux, dim=-1) if aux else hidden, embeds)


def mtp_forward(model: Any, batch: Batch, _aux_layers: tuple[int, ...] = ()) -> TargetOut:
    """The same; what the head takes are the hidden states behind the final norm."""
    return hybrid_forward(model, batch, ())


class MtpHead(nn.Module):
    """The target's head of multi-token prediction, its parameters named as checkpoints name them
    behind ``mtp.``; it is trained and evaluated as ``model.Draft`` is.
    """

    sees = True  # of image rows it gets what the tower sees

    def __init__(self, target: Any) -> None:
        """A new one; its layer begins as the target's last one, which attends."""
        super().__init__()
        text = target.config.text_config
        size = text.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        nn.init.normal_(self.fc.weight, std=0.02)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, EPS)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, EPS)
        layer = Qwen3_5DecoderLayer(text, len(LAYER_TYPES) - 1)
        layer.load_state_dict(copy.deepcopy(target.model.language_model.layers[-1].state_dict()))
        self.layers = nn.ModuleList([layer])
        self.norm = copy.deepcopy(target.model.language_model.norm)
        self.requires_grad_()
        self._head = (target.lm_head.weight,)  # the target's, and not trained with it

    def logits(self, h: Tensor) -> Tensor:
        """The target's head behind the head's own norm, which ``h`` has behind it."""
        return F.linear(h, self._head[0])

    def _input(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        parts = (
            _norm(embedded, self.pre_fc_norm_embedding),
            _norm(hidden, self.pre_fc_norm_hidden),
        )
        return self.fc(torch.cat(parts, dim=-1)).float()

    def _qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.layers[0]
        turned = mrope(positions, ROTARY, SECTIONS)
        return _gated_qkv(_norm(x, layer.input_layernorm), layer.self_attn, turned)

    def _finish(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        layer = self.layers[0]
        x = x + _attention_output(mixed, gate, layer.self_attn)
        x = x + mlp(_norm(x, layer.post_attention_layernorm), layer.mlp)
        return _norm(x, self.norm)

    def first(self, aux: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, DraftKeys]:
        """Step 0: row t takes the target's hidden state of token t, the embedding of token t + 1.

        Args:
            aux: [B, L, H]; embedded: [B, L, H]; positions: of token t, int64 [3, B, L].
        Returns:
            hidden [B, L, H] behind the norm, which the next step is fed, and keys.
        """
        x = self._input(aux, embedded)
        q, k, v, gate = self._qkv(x, positions)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(x, mixed, gate), DraftKeys((k, v), [])

    def next(
        self, h: Tensor, embedded: Tensor, positions: Tensor, rows: Tensor, keys: DraftKeys
    ) -> Tensor:
        """A later step at ``rows`` [B, R], as ``model.Draft.next``; positions int64 [B, R] are
        those of text, alike on all axes.
        """
        x = self._input(h, embedded)
        q, k, v, gate = self._qkv(x, positions.expand(3, *positions.shape))
        mixed = attend_later(q, (k, v), rows, keys, HEAD_DIM)
        return self._finish(x, mixed, gate)
