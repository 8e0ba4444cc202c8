"""BlockManifest: the properties of a block draft (DFlash, DFlash2, DSpark)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from trt_eagle3.checkpoint.manifest import DraftManifest

__all__ = ["BlockLayer", "BlockManifest", "ConfidenceHead", "MarkovHead"]


@dataclass(frozen=True, kw_only=True)
class BlockLayer:
    """The attention of one decoder layer.

    Attributes:
        causal: whether a row of the block sees only the rows before it. Context is visible either
            way, up to the window.
        window: slots that a row sees (``BlockManifest.window_rule``); 0 if all.
    """

    causal: bool
    window: int

    def __str__(self) -> str:
        """Describe it in a table."""
        within = "causal" if self.causal else "bidirectional"
        return f"{within}, window {self.window}" if self.window else within


@dataclass(frozen=True, kw_only=True)
class MarkovHead:
    """The head that corrects a row's logits by the token before (DSpark).

    Attributes:
        form: ``vanilla``: the latent is the embedding of the token before. ``gated``: a gate of
            hidden state and embedding scales it. ``rnn``: a state runs along the block.
        rank: width of the latent.
        state_from_anchor: for ``rnn``, whether the state also passes row 0 if row 0 is no draft.
    """

    form: Literal["vanilla", "gated", "rnn"]
    rank: int
    state_from_anchor: bool

    def __str__(self) -> str:
        """Describe it in a table."""
        return f"{self.form}, rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class ConfidenceHead:
    """The head that estimates the probability that a draft is accepted (DSpark).

    Attributes:
        with_markov: whether it reads the hidden state and the embedding of the token before, or the
            hidden state alone.
        temperatures: divisors of its logit, one per draft; empty if all are 1.
    """

    with_markov: bool
    temperatures: tuple[float, ...]

    def __str__(self) -> str:
        """Describe it in a table."""
        inputs = "hidden and markov embedding" if self.with_markov else "hidden"
        return f"{inputs}, temperatures {list(self.temperatures) or 1}"


@dataclass(frozen=True, kw_only=True)
class BlockManifest(DraftManifest):
    """A draft that predicts a block of tokens in one forward.

    The rows of a block are the anchor, which is the token sampled last, and mask tokens. They stand
    at consecutive sequence indices, the anchor's first.

    Attributes:
        method: ``dflash``: rows alone. ``dflash2``: with convolutions and a candidate selector.
            ``dspark``: with a markov head.
        block_size: rows of a trained forward, the anchor included.
        mask_token_id: the token of the other rows; its embedding is the target's or the draft's.
        mask_embedding: ``token``: the embedding of ``mask_token_id``. ``own``: the tensor
            ``mask_embedding``.
        shift: the token that a row predicts: at its ``own`` position, or at the ``next``.
        anchor_row: whether row 0 predicts a draft.
        layers: attention by layer.
        window_rule: ``row``: row q sees slot k if \\|q - k\\| is less than the window. ``anchor``:
            every row sees the context from anchor - window on, and the block as without a window.
        attention_bias: whether the attention projections have a bias.
        embedding_scale: factor on the rows' embeddings.
        logit_multiplier: factor on the logits.
        logit_softcap: c of ``c * tanh(logits / c)``, applied after the multiplier; 0 if none.
        conv_kernel, conv_group: taps, and channels per group, of the convolutions around a
            sublayer; 0 if none.
        selector_rank, selector_top_k: width of the codebooks, and candidates per row, of the
            selector; 0 if none.
        tensors: ``fc.weight`` [Hd, A*Ht], ``hidden_norm.weight``, ``norm.weight``,
            ``layers.{i}.{input_layernorm,post_attention_layernorm}.weight``,
            ``layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}``,
            ``layers.{i}.self_attn.{q,k}_norm.weight``,
            ``layers.{i}.mlp.{gate,up,down}_proj.weight``,
            ``layers.{i}.{attention_conv,mlp_conv}.base_kernel`` [2, taps, Hd],
            ``layers.{i}.{attention_conv,mlp_conv}.kernel_projection.weight``
            [2 * taps * (Hd / group), Hd],
            ``candidate_selector.{predecessor_codebook,successor_codebook}`` [V, r],
            ``candidate_selector.hidden_projection.weight`` [r, Hd],
            ``markov_head.markov_w1.weight`` [V, r], ``markov_head.markov_w2.weight`` [Vd, r],
            ``markov_head.{gate_proj,joint_proj}.{weight,bias}``,
            ``confidence_head.proj.{weight,bias}``, ``embed_tokens.weight``, ``lm_head.weight``,
            ``d2t``, ``mask_embedding`` [Hd].
    """

    kind: ClassVar[str] = "block"
    decided: ClassVar[frozenset[str]] = frozenset(
        {
            *("path", "tensors", "sources", "warnings", "num_layers", "hidden_size"),
            *("target_hidden_size", "intermediate_size", "draft_vocab_size", "attention_bias"),
            *("conv_kernel", "conv_group", "selector_rank", "head_dim", "method"),
            "mask_embedding",
        }
    )

    method: Literal["dflash", "dflash2", "dspark"]
    intermediate_size: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    mask_embedding: Literal["token", "own"]
    shift: Literal["own", "next"]
    anchor_row: bool
    layers: tuple[BlockLayer, ...]
    window_rule: Literal["row", "anchor"]
    attention_bias: bool
    embedding_scale: float
    logit_multiplier: float
    logit_softcap: float
    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    markov: MarkovHead | None
    confidence: ConfidenceHead | None

    def drafts_of(self, num_rows: int) -> int:
        """Return the number of tokens that a block of ``num_rows`` rows drafts."""
        return num_rows if self.anchor_row else num_rows - 1

    def rows_of(self, num_drafts: int) -> int:
        """Return the number of rows of a block that drafts ``num_drafts`` tokens."""
        return num_drafts if self.anchor_row else num_drafts + 1

    @property
    def is_causal(self) -> bool:
        """Whether all layers are causal within the block."""
        return all(layer.causal for layer in self.layers)

    @property
    def mixes_masks(self) -> bool:
        """Whether only some layers are causal within the block."""
        return not self.is_causal and any(layer.causal for layer in self.layers)

    @property
    def has_sequential_head(self) -> bool:
        """Whether the choice of a token depends on the token before."""
        return bool(self.selector_rank) or self.markov is not None

    @property
    def reads_hidden(self) -> bool:
        """Whether a head reads the hidden states of rows."""
        markov = self.markov is not None and self.markov.form != "vanilla"
        return bool(self.selector_rank) or markov or self.confidence is not None

    @property
    def first_head_row(self) -> int:
        """The first row that the heads run over."""
        passes = self.markov is not None and self.markov.state_from_anchor
        return 0 if self.anchor_row or passes else 1
