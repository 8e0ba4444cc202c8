"""A block draft (DFlash, DFlash2 or DSpark) in plain PyTorch, its parameters named as published.

It trains on many blocks per example at once; ``propose`` runs one block. Embeddings and head are
the target's and passed in.

# Shapes: B examples, L tokens, A anchors per example, N rows per block, D drafts per block,
# K aux states, H hidden, V vocabulary, r rank
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import EPS, HEAD_DIM, mlp, plain_rope, rotate
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["BlockDraft", "BlockShape", "load_block"]


@dataclass(frozen=True)
class BlockShape:
    """What a block draft is made of.

    Attributes:
        aux_layers: target layers whose outputs it reads.
        block_size: rows of a block, the anchor first.
        own_position: whether a row predicts the token at its own position, so that the anchor's row
            drafts nothing (DFlash); otherwise each row predicts the next token (DSpark).
        windows: attention window of each layer; 0: none.
        mask_id: token of the other rows.
        markov_rank: of DSpark's head; 0: none. With it comes the confidence head.
        conv_kernel, conv_group: taps and channels per group of DFlash2's convolutions; 0: none.
        selector_rank, selector_top_k: of DFlash2's selector; 0: none.
    """

    aux_layers: tuple[int, ...]
    block_size: int
    own_position: bool
    windows: tuple[int, ...]
    mask_id: int
    markov_rank: int = 0
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    hidden: int = 256
    intermediate: int = 448
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 704

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.own_position


class BlockConv(nn.Module):
    """A convolution along the rows of a block, before and after a sublayer."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        taps, groups = shape.conv_kernel, shape.hidden // shape.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, shape.hidden))
        self.base_kernel.data[:, 0] = 1.0  # a row passes through
        self.kernel_projection = nn.Linear(shape.hidden, 2 * taps * groups, bias=False)
        self.group = shape.conv_group

    def kernels(self, x: Tensor) -> Tensor:
        """Kernels [2, taps, ..., N, H] of the rows ``x`` [..., N, H]."""
        taps = self.base_kernel.shape[1]
        dynamic = self.kernel_projection(x).unflatten(-1, (2, taps, -1)).movedim((-3, -2), (0, 1))
        base = self.base_kernel.view(2, taps, *[1] * (x.ndim - 1), -1)
        return base + dynamic.repeat_interleave(self.group, dim=-1)

    @staticmethod
    def convolve(x: Tensor, kernels: Tensor) -> Tensor:
        """Sum taps of ``x`` [..., N, H]; rows before the block count as zero."""
        found = kernels[0] * x
        for tap in range(1, len(kernels)):
            found = found + kernels[tap] * F.pad(x[..., :-tap, :], (0, 0, tap, 0))
        return found


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer; its keys and values of the context come from the target's states."""

    def __init__(self, shape: BlockShape, window: int) -> None:
        super().__init__()
        hidden, inner = shape.hidden, shape.intermediate
        attn, self.mlp = nn.Module(), nn.Module()
        attn.q_proj = nn.Linear(hidden, shape.heads * HEAD_DIM, bias=False)
        attn.k_proj = nn.Linear(hidden, shape.kv_heads * HEAD_DIM, bias=False)
        attn.v_proj = nn.Linear(hidden, shape.kv_heads * HEAD_DIM, bias=False)
        attn.o_proj = nn.Linear(shape.heads * HEAD_DIM, hidden, bias=False)
        attn.q_norm, attn.k_norm = nn.RMSNorm(HEAD_DIM, EPS), nn.RMSNorm(HEAD_DIM, EPS)
        self.self_attn = attn
        self.mlp.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, inner, bias=False)
        self.mlp.down_proj = nn.Linear(inner, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, EPS)
        self.post_attention_layernorm = nn.RMSNorm(hidden, EPS)
        if shape.conv_kernel:
            self.attention_conv, self.mlp_conv = BlockConv(shape), BlockConv(shape)
        self.window = window

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """Run blocks ``x`` [B, A, N, H] at ``anchors`` [B, A] over ``context`` [B, L, H]."""
        normed = self.input_layernorm(x)
        conv = getattr(self, "attention_conv", None)
        if conv is None:
            x = x + self._attend(normed, context, anchors)
        else:
            before, after = conv.kernels(normed)
            attended = self._attend(conv.convolve(normed, before), context, anchors)
            x = x + conv.convolve(attended, after)
        normed = self.post_attention_layernorm(x)
        conv = getattr(self, "mlp_conv", None)
        if conv is None:
            return x + mlp(normed, self.mlp)
        before, after = conv.kernels(normed)
        return x + conv.convolve(mlp(conv.convolve(normed, before), self.mlp), after)

    def _attend(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        attn, num_context = self.self_attn, context.shape[1]
        blocks, rows = x.shape[1], x.shape[2]
        flat = x.flatten(1, 2)
        position = (anchors[..., None] + torch.arange(rows, device=x.device)).flatten(1)
        slots = torch.arange(num_context, device=x.device).expand(len(x), -1)
        q = attn.q_norm(attn.q_proj(flat).unflatten(-1, (-1, HEAD_DIM))).transpose(1, 2)
        both = torch.cat([context.to(flat.dtype), flat], dim=1)
        k = attn.k_norm(attn.k_proj(both).unflatten(-1, (-1, HEAD_DIM))).transpose(1, 2)
        v = attn.v_proj(both).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        where = torch.cat([slots, position], dim=1)
        q = rotate(q, *plain_rope(position)).to(v.dtype)
        k = rotate(k, *plain_rope(where)).to(v.dtype)
        own = torch.arange(blocks, device=x.device).repeat_interleave(rows)
        seen = torch.cat(
            [
                slots[:, None] < anchors.repeat_interleave(rows, dim=1)[..., None],
                (own[:, None] == own).expand(len(x), -1, -1),
            ],
            dim=2,
        )
        if self.window:
            seen = seen & ((position[..., None] - where[:, None]).abs() < self.window)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
        return attn.o_proj(mixed.transpose(1, 2).flatten(2)).view_as(x)


class BlockDraft(nn.Module):
    """A block draft and its heads."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.hidden
        self.fc = nn.Linear(len(shape.aux_layers) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(hidden, EPS), nn.RMSNorm(hidden, EPS)
        self.layers = nn.ModuleList(BlockLayer(shape, window) for window in shape.windows)
        vocab, rank = shape.vocab_size, shape.markov_rank
        if rank:
            self.markov_head, self.confidence_head = nn.Module(), nn.Module()
            self.markov_head.markov_w1 = nn.Embedding(vocab, rank)
            self.markov_head.markov_w2 = nn.Linear(rank, vocab, bias=False)
            self.confidence_head.proj = nn.Linear(hidden + rank, 1)
        if shape.selector_rank:
            selector = self.candidate_selector = nn.Module()
            selector.predecessor_codebook = nn.Parameter(torch.empty(vocab, shape.selector_rank))
            selector.successor_codebook = nn.Parameter(torch.empty(vocab, shape.selector_rank))
            selector.hidden_projection = nn.Linear(hidden, shape.selector_rank, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.0 if "kernel_projection" in name else 0.02)

    def forward(self, aux: Tensor, anchors: Tensor, embedded: Tensor) -> Tensor:
        """Return hidden states [B, A, N, H] of blocks.

        Args:
            aux: [B, L, K * H] of the target. anchors: int64 [B, A]; a block sees the columns before
                its anchor. embedded: [B, A, N, H], the anchor's and the mask's embeddings.
        """
        context = self.hidden_norm(self.fc(aux).float())
        x = embedded.float()  # the residual stays float32 under autocast
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x)[..., self.shape.own_position :, :]

    def markov(self, previous: Tensor) -> Tensor:
        """Logit corrections [..., V] by the tokens before, int64 [...]."""
        return self.markov_head.markov_w2(self.markov_head.markov_w1(previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of the probability that a draft is accepted."""
        embedded = self.markov_head.markov_w1(previous)
        return self.confidence_head.proj(torch.cat([hidden, embedded], dim=-1))[..., 0]

    def transitions(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Selector scores [..., V] of all tokens, less their logits."""
        selector = self.candidate_selector
        mixed = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
        return mixed @ selector.successor_codebook.T

    @torch.inference_mode()
    def propose(self, aux: Tensor, anchor: Tensor, embed: Any, head: Any) -> list[int]:
        """Draft greedily after ``anchor`` [1, 1], whose column ends ``aux`` [1, L, K * H]."""
        masks = anchor.new_full((1, self.shape.block_size - 1), self.shape.mask_id)
        embedded = embed(torch.cat([anchor, masks], dim=1))[:, None]
        hidden = self(aux, anchor.new_full((1, 1), aux.shape[1]), embedded)[0, 0]
        logits, previous, tokens = head(hidden), anchor[0, 0], []
        for row, scores in zip(hidden, logits, strict=True):
            if self.shape.markov_rank:
                scores = scores + self.markov(previous)
            if self.shape.selector_rank:
                best = scores.topk(self.shape.selector_top_k)
                chosen = best.values + self.transitions(row, previous)[best.indices]
                previous = best.indices[chosen.argmax()]
            else:
                previous = scores.argmax()
            tokens.append(int(previous))
        return tokens


def load_block(folder: Path) -> BlockDraft:
    """Read a draft as ``export.py`` saves it, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = config | config.get("dflash_config", {})
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    shape = BlockShape(
        aux_layers=tuple(own["target_layer_ids"]),
        block_size=own["block_size"],
        own_position="dflash_config" in config,
        windows=tuple(config["sliding_window"] if slide else 0 for slide in slides),
        mask_id=own["mask_token_id"],
        markov_rank=own.get("markov_rank", 0),
        conv_kernel=own.get("conv_kernel_size", 0),
        conv_group=own.get("conv_group_size", 0),
        selector_rank=own.get("selector_rank", 0),
        selector_top_k=own.get("selector_top_k", 0),
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
    )
    tensors = load_file(folder / "model.safetensors")
    draft = BlockDraft(shape)
    names = draft.state_dict()
    draft.load_state_dict({name: t.float() for name, t in tensors.items() if name in names})
    return draft
