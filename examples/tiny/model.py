"""The target's forward over padded batches, and the EAGLE-3 draft, in plain PyTorch.

The target is a ``Qwen3VLForConditionalGeneration``; ``target_forward`` runs its modules batched
over images and examples, which its own forward does one frame at a time. ``check.py`` compares the
two.

# Shapes: B examples, L tokens, N temporal patches, S slots (patches of the largest), H hidden, R
rows, K draft steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from batch import Batch
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

__all__ = [
    "AUX_LAYERS",
    "EPS",
    "HEAD_DIM",
    "Draft",
    "DraftKeys",
    "Forward",
    "TargetOut",
    "attend_later",
    "embed",
    "mlp",
    "mrope",
    "plain_rope",
    "rotate",
    "route",
    "target_config",
    "target_forward",
]

NUM_LAYERS = 8
AUX_LAYERS = (1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4)
HEAD_DIM, ROPE_THETA, SECTIONS, EPS = 64, 5e6, (12, 10, 10), 1e-6


def target_config(ids: dict[str, int], vocab_size: int) -> Qwen3VLConfig:
    """Geometry of the tiny target; ``ids`` maps special tokens to their ids."""
    rope = {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": list(SECTIONS),
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 448,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": EPS,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 6,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_heads": 3,
        "out_hidden_size": 256,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1, 3, 5],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half rope; cos and sin broadcast over the heads axis of ``x`` [..., heads, rows,
    dim].
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """float32 [..., dim / 2]: position times base ** (-2 i / dim)."""
    inv_freq = base ** -(
        torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    )
    return positions[..., None].float() * inv_freq


def _cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([angles, angles], dim=-1)
    return both.cos(), both.sin()


def mlp(x: Tensor, module: nn.Module) -> Tensor:
    """SwiGLU, or the mixture that ``module`` has instead: rows of all experts, of which a row's
    own count.
    """
    if not hasattr(module, "experts"):
        return module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))
    weights = route(x, module)
    gate_up = torch.einsum("blh,eih->blei", x, module.experts.gate_up_proj.to(x.dtype))
    gate, up = gate_up.chunk(2, dim=-1)
    inner = F.silu(gate) * up * weights[..., None].to(x.dtype)
    return torch.einsum("blei,ehi->blh", inner, module.experts.down_proj.to(x.dtype))


def route(x: Tensor, module: nn.Module) -> Tensor:
    """float32 [B, L, E]: what each expert counts for each row; 0 but for the best ``top_k``."""
    chances = F.linear(x, module.gate.weight.to(x.dtype)).float().softmax(dim=-1)
    if module.training:
        module.gate.chances = chances  # what the experts' balance is reckoned by
    best, experts = chances.topk(module.gate.top_k, dim=-1)
    best = best / best.sum(dim=-1, keepdim=True)
    return torch.zeros_like(chances).scatter(-1, experts, best)


def _norm(x: Tensor, module: nn.Module) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight.to(x.dtype), EPS)


# ---- target


def _vision_inputs(visual: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded patch embeddings [N, S, d], cos and sin [N, 1, S, head], key mask [N, 1, 1, S]."""
    pixels = batch.patches.float() / 127.5 - 1.0
    x = F.linear(pixels, visual.patch_embed.proj.weight.flatten(1), visual.patch_embed.proj.bias)
    side = int(visual.pos_embed.num_embeddings**0.5)
    row, column, rows, columns = batch.grid.unbind(1)
    y, x_at = (
        row * (side - 1) / (rows - 1).clamp(min=1),
        column * (side - 1) / (columns - 1).clamp(min=1),
    )
    y0, x0 = y.floor(), x_at.floor()
    for dy in (0, 1):
        for dx in (0, 1):
            weight = (1 - (y - y0 - dy).abs()) * (1 - (x_at - x0 - dx).abs())
            index = (y0 + dy).clamp(max=side - 1) * side + (x0 + dx).clamp(max=side - 1)
            x = x + weight[:, None] * F.embedding(index.long(), visual.pos_embed.weight)
    slots = int(batch.counts.max())
    total = len(batch.counts) * slots
    padded = x.new_zeros(total, x.shape[1]).index_copy(0, batch.slot, x)
    half = visual.blocks[0].attn.head_dim // 2
    angles = torch.cat([_angles(row, half, 10000.0), _angles(column, half, 10000.0)], dim=-1)
    angles = angles.new_zeros(total, half).index_copy(0, batch.slot, angles)
    cos, sin = _cos_sin(angles.view(-1, 1, slots, half))
    mask = (torch.arange(slots, device=x.device)[None] < batch.counts[:, None])[:, None, None]
    return padded.view(-1, slots, x.shape[1]), cos, sin, mask


def _vision(visual: nn.Module, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Merged patch embeddings [M, H] and the deepstack levels, each [M, H]."""
    x, cos, sin, mask = _vision_inputs(visual, batch)
    merged_slot = batch.slot.view(-1, 4)[:, 0] // 4

    def merge(merger: nn.Module) -> Tensor:
        blocks = x.reshape(-1, 4 * x.shape[-1]).index_select(0, merged_slot)
        if merger.use_postshuffle_norm:
            blocks = merger.norm(blocks)
        else:
            blocks = merger.norm(blocks.view(-1, x.shape[-1])).view_as(blocks)
        return merger.linear_fc2(F.gelu(merger.linear_fc1(blocks)))

    levels, after = [], list(getattr(visual, "deepstack_visual_indexes", ()))
    for index, block in enumerate(visual.blocks):
        heads = block.attn.num_heads
        q, k, v = (
            block.attn.qkv(block.norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + block.attn.proj(mixed)
        hidden = F.gelu(block.mlp.linear_fc1(block.norm2(x)), approximate="tanh")
        x = x + block.mlp.linear_fc2(hidden)
        if index in after:
            levels.append(merge(visual.deepstack_merger_list[after.index(index)]))
    return merge(visual.merger), levels


def mrope(
    positions: Tensor, dim: int = HEAD_DIM, sections: tuple[int, ...] = SECTIONS
) -> tuple[Tensor, Tensor]:
    """Interleaved three-axis rope; positions int64 [3, B, L] -> cos, sin [B, 1, L, dim]."""
    angles = _angles(positions, dim, ROPE_THETA)
    chosen = angles[0].clone()
    for axis in (1, 2):
        taken = slice(axis, 3 * sections[axis], 3)
        chosen[..., taken] = angles[axis][..., taken]
    return _cos_sin(chosen[:, None])


def plain_rope(positions: Tensor) -> tuple[Tensor, Tensor]:
    """One-axis rope of a draft; positions int64 [B, L] -> cos, sin [B, 1, L, dim]."""
    return _cos_sin(_angles(positions, HEAD_DIM, ROPE_THETA)[:, None])


def _add_rows(x: Tensor, rows: Tensor, update: Tensor) -> Tensor:
    """``x`` [B, L, H] with ``update`` [M, H] added at flat ``rows``."""
    return x.flatten(0, 1).index_add(0, rows, update.to(x.dtype)).view_as(x)


@dataclass
class TargetOut:
    """hidden: final normed hidden [B, L, H]; aux: what a draft takes of it, else outputs of three
    layers before deepstack, concatenated [B, L, 3H]; embeds: what the first layer got [B, L, H].
    """

    hidden: Tensor
    aux: Tensor
    embeds: Tensor


Forward = Callable[[Any, Batch, tuple[int, ...]], TargetOut]
"""A target's forward over a batch; the layers are those of ``aux``."""


def embed(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Embeddings [B, L, H] with what the tower sees in its rows, and the deepstack levels."""
    x = model.model.language_model.embed_tokens(batch.ids)
    if not len(batch.counts):
        return x, []
    merged, levels = _vision(model.model.visual, batch)
    return x.flatten(0, 1).index_copy(0, batch.visual_rows, merged.to(x.dtype)).view_as(x), levels


def target_forward(
    model: Qwen3VLForConditionalGeneration, batch: Batch, aux_layers: tuple[int, ...] = AUX_LAYERS
) -> TargetOut:
    """Causal forward over right-padded rows; padding never reaches a real row."""
    decoder = model.model.language_model
    x, levels = embed(model, batch)
    embeds = x
    cos, sin = mrope(batch.positions)
    aux = []
    for index, layer in enumerate(decoder.layers):
        attn = layer.self_attn
        h = _norm(x, layer.input_layernorm)
        q, k, v = (
            p(h).unflatten(-1, (-1, HEAD_DIM)) for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k, v = (
            _norm(q, attn.q_norm).transpose(1, 2),
            _norm(k, attn.k_norm).transpose(1, 2),
            v.transpose(1, 2),
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(mixed.transpose(1, 2).flatten(2))
        h = _norm(x, layer.post_attention_layernorm)
        x = x + mlp(h, layer.mlp)
        if index in aux_layers:
            aux.append(x)  # before the deepstack level of this layer
        if index < len(levels):
            x = _add_rows(x, batch.visual_rows, levels[index])
    hidden = _norm(x, decoder.norm)
    return TargetOut(hidden, torch.cat(aux, dim=-1) if aux else hidden, embeds)


# ---- draft


class DraftLayer(nn.Module):
    """``midlayer``: attention over concat[embedding, hidden], then SwiGLU."""

    def __init__(self, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(2 * hidden, heads * HEAD_DIM, bias=False)
        self.self_attn.k_proj = nn.Linear(2 * hidden, kv_heads * HEAD_DIM, bias=False)
        self.self_attn.v_proj = nn.Linear(2 * hidden, kv_heads * HEAD_DIM, bias=False)
        self.self_attn.o_proj = nn.Linear(heads * HEAD_DIM, hidden, bias=False)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.mlp.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, EPS)
        self.input_layernorm = nn.RMSNorm(hidden, EPS)
        self.post_attention_layernorm = nn.RMSNorm(hidden, EPS)


@dataclass
class DraftKeys:
    """Keys and values:

    ``prompt`` of step 0 [B, heads, L, d]; ``steps`` of rows R at later steps [B, heads, R, d].
    """

    prompt: tuple[Tensor, Tensor]
    steps: list[tuple[Tensor, Tensor]]


def attend_later(
    q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, keys: DraftKeys, head_dim: int
) -> Tensor:
    """Attention [B, heads, R, d] of a later step at ``rows`` [B, R]: over step 0 up to its row, and
    its own earlier steps, among them ``new``, by which ``keys`` grow.
    """
    keys.steps.append(new)
    prompt_k, prompt_v = keys.prompt
    scores = q @ prompt_k.transpose(-1, -2)
    seen = torch.arange(prompt_k.shape[2], device=q.device) <= rows[:, None, :, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    own = [(q * step_k).sum(-1, keepdim=True) for step_k, _ in keys.steps]
    weights = (torch.cat([scores, *own], dim=-1).float() * head_dim**-0.5).softmax(dim=-1)
    weights = weights.to(prompt_v.dtype)
    mixed = weights[..., : prompt_k.shape[2]] @ prompt_v
    for index, (_, step_v) in enumerate(keys.steps):
        mixed = mixed + weights[..., prompt_k.shape[2] + index, None] * step_v
    return mixed


class Draft(nn.Module):
    """EAGLE-3 draft with plain rope on the temporal axis; the token embedding is the target's,
    passed in.
    """

    sees = False  # of image rows it gets the pads' embeddings

    def __init__(
        self,
        vocab_size: int,
        hidden: int = 256,
        intermediate: int = 640,
        heads: int = 4,
        kv: int = 2,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = DraftLayer(hidden, intermediate, heads, kv)
        self.norm = nn.RMSNorm(hidden, EPS)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        self.groups = heads // kv
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)

    def _qkv(self, h: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer, attn = self.midlayer, self.midlayer.self_attn
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(h)], dim=-1)
        q, k, v = (
            p(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        cos, sin = plain_rope(positions)
        k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        return rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v

    def _finish(self, h: Tensor, mixed: Tensor) -> Tensor:
        """Residual on the raw hidden; returns the pre-norm hidden, which is also what the next
        step is fed.
        """
        layer = self.midlayer
        h = h + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = layer.post_attention_layernorm(h)
        return h + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))

    def logits(self, h: Tensor) -> Tensor:
        return self.lm_head(self.norm(h))

    def first(self, aux: Tensor, embedded: Tensor, positions: Tensor) -> tuple[Tensor, DraftKeys]:
        """Step 0: row t takes the target's features of token t and the embedding of token t + 1.

        Args:
            aux: [B, L, 3H]; embedded: [B, L, H]; positions: of token t, int64 [3, B, L], of which
                the temporal ones are taken.
        Returns:
            pre-norm hidden [B, L, H], keys.
        """
        h = self.fc(aux).float()  # the residual stays float32 under autocast
        q, k, v = self._qkv(h, embedded, positions[0])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(h, mixed), DraftKeys((k, v), [])

    def next(
        self, h: Tensor, embedded: Tensor, positions: Tensor, rows: Tensor, keys: DraftKeys
    ) -> Tensor:
        """A later step at ``rows`` [B, R]: attends step 0 up to its row and its own earlier steps;
        extends ``keys``.

        Args:
            h: previous step's hidden [B, R, H]; embedded: [B, R, H] of the token that step
                proposed.
            positions: temporal position of the row plus the step index, int64 [B, R].
        """
        q, k, v = self._qkv(h, embedded, positions)
        return self._finish(h, attend_later(q, (k, v), rows, keys, HEAD_DIM))
