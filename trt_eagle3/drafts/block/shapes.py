"""The tensors of a block draft."""

from __future__ import annotations

from trt_eagle3.drafts.block.manifest import BlockManifest

__all__ = ["block_shapes"]

Shapes = dict[str, tuple[int, ...]]


def block_shapes(manifest: BlockManifest) -> Shapes:
    """Return canonical name and shape of every weight of a draft of this geometry, without d2t."""
    m, hidden = manifest, manifest.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden, len(m.aux_layers) * m.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(m.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(m).items()}
    shapes |= _selector(m) | _sequential(m)
    if m.embedding == "own":
        shapes["embed_tokens.weight"] = (m.vocab_size, hidden)
    if m.head == "own":
        shapes["lm_head.weight"] = (m.draft_vocab_size, hidden)
    if m.mask_embedding == "own":
        shapes["mask_embedding"] = (hidden,)
    return shapes


def _layer(m: BlockManifest) -> Shapes:
    hidden, inner = m.hidden_size, m.intermediate_size
    q, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    linears = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: Shapes = {f"self_attn.{p}_proj.weight": shape for p, shape in linears.items()}
    if m.attention_bias:
        shapes |= {f"self_attn.{p}_proj.bias": shape[:1] for p, shape in linears.items()}
    shapes |= {f"self_attn.{p}_norm.weight": (m.head_dim,) for p in "qk"}
    shapes |= {f"mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {f"{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    if m.conv_kernel:
        rows = 2 * m.conv_kernel * (hidden // m.conv_group)
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, m.conv_kernel, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (rows, hidden)
    return shapes


def _selector(m: BlockManifest) -> Shapes:
    if not m.selector_rank:
        return {}
    book, prefix = (m.vocab_size, m.selector_rank), "candidate_selector."
    return {
        f"{prefix}predecessor_codebook": book,
        f"{prefix}successor_codebook": book,
        f"{prefix}hidden_projection.weight": (m.selector_rank, m.hidden_size),
    }


def _sequential(m: BlockManifest) -> Shapes:
    shapes: Shapes = {}
    if (head := m.markov) is not None:
        rank, prefix = head.rank, "markov_head."
        shapes[f"{prefix}markov_w1.weight"] = (m.vocab_size, rank)
        shapes[f"{prefix}markov_w2.weight"] = (m.draft_vocab_size, rank)
        if head.form == "gated":
            shapes[f"{prefix}gate_proj.weight"] = (rank, m.hidden_size + rank)
            shapes[f"{prefix}gate_proj.bias"] = (rank,)
        if head.form == "rnn":
            shapes[f"{prefix}joint_proj.weight"] = (3 * rank, 2 * rank + m.hidden_size)
            shapes[f"{prefix}joint_proj.bias"] = (3 * rank,)
    if m.confidence is not None:
        width = m.hidden_size
        if m.confidence.with_markov:
            assert m.markov is not None, "checked by the reader"
            width += m.markov.rank
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes
