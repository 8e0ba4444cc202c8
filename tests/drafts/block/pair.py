"""A random target with a random block draft: decoders over both, and what the draft should say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.decode.pair import PAGE_SIZE, PREFILL_CHUNK, VOCAB, Pair, make_pair
from tests.reference.block import random_block
from tests.reference.checkpoint import file_name
from trt_eagle3.decode.forward.block_runner import BlockRunner
from trt_eagle3.decode.forward.runner import TargetRunner
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.request.prompt import Prompt
from trt_eagle3.decode.speculation.block import BlockDrafter
from trt_eagle3.decode.speculation.block_heads import BlockHeads
from trt_eagle3.decode.speculation.proposal import Proposal
from trt_eagle3.decode.step.decoder import Decoder
from trt_eagle3.drafts.block import KIND
from trt_eagle3.drafts.block.graph import block_graph, context_graph
from trt_eagle3.drafts.block.manifest import BlockLayer, ConfidenceHead, MarkovHead
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.parity.reference.draft import KeysValues
from trt_eagle3.spec import RopeSpec

CAUSAL, WINDOWED = BlockLayer(causal=True, window=0), BlockLayer(causal=False, window=6)
DSPARK = {"method": "dspark", "shift": "next", "anchor_row": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, windows and a causal layer": {"layers": (CAUSAL, WINDOWED), "mask_embedding": "own"},
    "dflash2": {
        "method": "dflash2",
        "conv_kernel": 2,
        "conv_group": 8,
        "selector_rank": 4,
        "selector_top_k": 5,
    },
    "dspark vanilla": {
        **DSPARK,
        "markov": MarkovHead(form="vanilla", rank=4, state_from_anchor=False),
        "confidence": ConfidenceHead(with_markov=True, temperatures=(1.0, 1.5, 1.0, 0.5, 1.0, 2.0)),
    },
    "dspark gated, reduced vocabulary": {
        **DSPARK,
        "markov": MarkovHead(form="gated", rank=4, state_from_anchor=False),
        "draft_vocab_size": 9,
    },
    "dspark rnn": {
        **DSPARK,
        "anchor_row": False,
        "markov": MarkovHead(form="rnn", rank=4, state_from_anchor=True),
        "confidence": ConfidenceHead(with_markov=False, temperatures=()),
    },
}


@dataclass
class Drafted:
    """Chains that a drafter proposed: rows before each, its tokens with the root first."""

    chains: list[tuple[int, list[int]]] = field(default_factory=list)


class RecordingBlock(BlockDrafter):
    """Notes the chains of batches of one."""

    drafted: Drafted

    def _draft(self, tree: Any, lengths: Tensor, roots: Tensor, *args: Any) -> Proposal:
        found = super()._draft(tree, lengths, roots, *args)
        self.drafted.chains.append((int(lengths[0]), found.tokens[0].tolist()))
        return found


@dataclass(frozen=True)
class BlockPair:
    """``pair``: the target. ``reference``: the block draft. ``sessions``: of its graphs."""

    pair: Pair
    reference: BlockReference
    sessions: tuple[OnnxRuntimeSession, OnnxRuntimeSession]

    def drafter(self, num_slots: int, *, prefill_chunk: int = PREFILL_CHUNK) -> RecordingBlock:
        m = self.reference.manifest
        tables = {name: self.reference.weights[name] for name in KIND.tables(m)}
        runner = BlockRunner(
            *self.sessions,
            layer_states(self.sessions[1].states, num_slots),
            EmbeddingTable(m.tensors["embed_tokens.weight"], torch.float32),
            m,
            self.reference.weights.get("d2t"),
            tables.get("mask_embedding"),
        )
        heads = BlockHeads(m, tables, runner.target_ids)
        drafter = RecordingBlock(runner, heads, m, max_rows=prefill_chunk)
        drafter.drafted = Drafted()
        return drafter

    def decoder(
        self, num_pages: int, drafter: BlockDrafter | None = None, **options: Any
    ) -> Decoder:
        session, target = self.pair.sessions["target"], self.pair.target
        states = layer_states(session.states, num_pages * PAGE_SIZE)
        levels = target.spec.num_visual_levels
        runner = TargetRunner(session, states, self.pair.tables[0], levels)
        drafter = drafter or self.drafter(num_pages * PAGE_SIZE)
        options = {"max_seq_len": 96, "prefill_chunk": PREFILL_CHUNK, **options}
        return Decoder(runner, drafter, **options)

    def context(self, prompt: Prompt, tokens: list[int]) -> KeysValues:
        """Keys and values of all rows of a prompt and its answer ``tokens``."""
        m, target = self.reference.manifest, self.pair.target
        token_ids = torch.cat([prompt.token_ids, torch.tensor(tokens)])
        visual = torch.zeros(len(token_ids), dtype=torch.bool)
        visual[: len(prompt.token_ids)] = prompt.visual_rows
        embeds = self.pair.tables[0].lookup(token_ids)
        embeds[visual] = prompt.vision.embeds
        positions = prompt.positions(0, len(token_ids)).long()
        states = target.states(embeds, positions, visual, prompt.vision.visual_levels)
        return self.reference.context(states.aux(m.aux_layers, m.aux_pre_deepstack))

    def chain(self, context: KeysValues, root: int, length: int, num_drafts: int) -> list[int]:
        """The reference's tokens after ``root`` at index ``length``."""
        m = self.reference.manifest
        before = [(keys[:length], values[:length]) for keys, values in context]
        rows = self.reference.block(root, length, m.rows_of(num_drafts), before)
        return list(self.reference.propose(root, rows).tokens)


def make_block_pair(directory: Path, name: str) -> BlockPair:
    """A pair with the draft ``DRAFTS[name]``."""
    rope = RopeSpec.plain(8, 1e4, "interleaved", (2, 1, 1))
    pair = make_pair(directory, seed=2, rope=rope)
    own = directory / "block"
    own.mkdir()
    fields = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "mask_token_id": VOCAB - 1}
    reference = random_block(own, seed=3, **{**fields, **DRAFTS[name]})
    sessions = []
    for graph, build in (("context", context_graph), ("block", block_graph)):
        path = own / f"{graph}.onnx"
        model = build(reference.manifest, "float32", PAGE_SIZE, file_name)
        path.write_bytes(model.SerializeToString())
        sessions.append(OnnxRuntimeSession(path, own))
    return BlockPair(pair, reference, (sessions[0], sessions[1]))
