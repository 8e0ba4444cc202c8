"""The loop: prefill, then cycles of propose, verify, accept, compact, extend. Batch 1, greedy."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from trt_eagle3.checkpoint.manifest import DraftManifest
from trt_eagle3.decode.accept import Accepted, accept_greedy
from trt_eagle3.decode.kv_cache import PagePool, PageTable
from trt_eagle3.decode.propose import DraftState, Proposer, draft_decode_position, draft_positions, draft_prompt_embeds
from trt_eagle3.decode.runner import Place, TargetRunner, causal_mask
from trt_eagle3.decode.tree import Tree

__all__ = ["Drafting", "Loop", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target sees it: P rows, of which N are visual.

    Attributes:
        token_ids: int64 [P]. position_ids: int32 [3, P]. visual_rows: bool [P].
        visual_embeds: [N, H]. deepstack: [L, N, H].
        rope_delta: what a row's index lacks to its rope position after the prompt.
    """

    token_ids: Tensor
    position_ids: Tensor
    rope_delta: int
    visual_rows: Tensor
    visual_embeds: Tensor
    deepstack: Tensor


@dataclass(frozen=True)
class Drafting:
    """The drafting side of a loop: who proposes, what the draft is, and the tree it fills."""

    proposer: Proposer
    manifest: DraftManifest
    tree: Tree


class Loop:
    """Decodes one sequence at a time."""

    def __init__(self, target: TargetRunner, pool: PagePool, max_seq_len: int, prefill_chunk: int) -> None:
        self._target = target
        self._pool = pool
        self._max_seq_len = max_seq_len
        self._chunk = prefill_chunk

    def run(self, prompt: Prompt, drafting: Drafting | None = None) -> Generator[tuple[int, ...]]:
        """Yield the tokens of each target pass, without end: the caller stops at EOS or its own limit.

        Ends by itself when the sequence has ``max_seq_len`` tokens. Where a tree no longer fits, it decodes plainly.
        """
        pages = PageTable(self._pool)
        try:
            yield from self._cycles(prompt, pages, drafting)
        finally:
            pages.truncate(0)

    def _cycles(self, prompt: Prompt, pages: PageTable, drafting: Drafting | None) -> Generator[tuple[int, ...]]:
        length = len(prompt.token_ids)
        token, aux = self._prefill(prompt, pages)
        yield (token,)
        state = self._draft_prompt(prompt, token, aux, pages, drafting) if drafting and aux is not None else None
        while length + 1 < self._max_seq_len:
            tree = (
                drafting.tree if drafting and length + drafting.tree.num_nodes < self._max_seq_len else Tree.root_only()
            )
            pages.reserve(length + tree.num_nodes)
            position = length + prompt.rope_delta
            tokens = torch.tensor([token])
            if drafting and state and tree.num_nodes > 1:
                assert state.length == length, f"draft holds {state.length} rows, target {length}"
                first = draft_decode_position(drafting.manifest, length, position)
                tokens = drafting.proposer.propose(tree, token, state, pages, first)
            accepted, aux = self._verify(tree, tokens, length, position, pages)
            if drafting and state and tree.num_nodes > 1:
                state = self._extend_draft(drafting, accepted, aux, length, position, pages)
            length += len(accepted.tokens)
            token = accepted.tokens[-1]
            yield accepted.tokens

    def _prefill(self, prompt: Prompt, pages: PageTable) -> tuple[int, Tensor | None]:
        """Run the prompt in chunks; the first token and the aux hidden states [P, k * H] of all rows."""
        num_rows = len(prompt.token_ids)
        pages.reserve(num_rows)
        embeds = self._target.embedding.lookup(prompt.token_ids)
        embeds[prompt.visual_rows] = prompt.visual_embeds.to(embeds.dtype)
        parts: list[Tensor] = []
        for start in range(0, num_rows, self._chunk):
            stop = min(start + self._chunk, num_rows)
            place = Place(start, pages.pages(stop), causal_mask(stop - start), prompt.position_ids[:, start:stop])
            deepstack = _deepstack_rows(prompt, embeds, start, stop)
            last = torch.tensor([stop - start - 1])
            logits, aux = self._target.forward(embeds[start:stop], place, last, deepstack)
            if aux is not None:
                parts.append(aux)
        return int(logits[0].argmax()), torch.cat(parts) if parts else None

    def _draft_prompt(
        self, prompt: Prompt, first_token: int, aux: Tensor, pages: PageTable, drafting: Drafting
    ) -> DraftState:
        """Give the draft the prompt's rows: features of every row, tokens one ahead."""
        manifest, runner = drafting.manifest, drafting.proposer.runner
        ahead = torch.cat([prompt.token_ids[1:], torch.tensor([first_token])])
        embeds = draft_prompt_embeds(manifest, runner.embedding.lookup(ahead), prompt.visual_embeds, prompt.visual_rows)
        following = torch.full((3,), len(ahead) + prompt.rope_delta, dtype=torch.int32)
        positions = draft_positions(manifest, 0, prompt.position_ids, following)
        return drafting.proposer.extend(0, pages, embeds, runner.fuse(aux), positions)

    def _verify(
        self, tree: Tree, tokens: Tensor, length: int, position: int, pages: PageTable
    ) -> tuple[Accepted, Tensor | None]:
        """One target pass over the tree; keep the accepted path's rows, in the cache and in aux [path, k * H]."""
        place = Place(
            past=length,
            pages=pages.pages(length + tree.num_nodes),
            mask=tree.mask,
            positions=(tree.depths.int() + position).expand(3, -1),
        )
        logits, aux = self._target.forward(self._target.embedding.lookup(tokens), place, torch.arange(tree.num_nodes))
        said = logits.argmax(dim=-1)
        target_tokens, draft_tokens = torch.stack(
            [said, tokens.to(said.device, non_blocking=True)]
        ).tolist()  # the cycle's one wait
        accepted = accept_greedy(target_tokens, draft_tokens, tree.parents)
        path, kept = torch.tensor(accepted.path), torch.arange(len(accepted.path))
        if not torch.equal(path, kept):
            self._target.cache.move(pages.slots(length + path), pages.slots(length + kept))
            aux = None if aux is None else aux[path.to(aux.device, non_blocking=True)]
        return accepted, None if aux is None else aux[: len(path)]

    def _extend_draft(
        self, drafting: Drafting, accepted: Accepted, aux: Tensor | None, length: int, position: int, pages: PageTable
    ) -> DraftState:
        """Overwrite the draft's guesses by rows with true features for what was accepted."""
        assert aux is not None
        num_rows = len(accepted.tokens)
        row_positions = (torch.arange(num_rows, dtype=torch.int32) + position).expand(3, -1)
        following = torch.full((3,), position + num_rows, dtype=torch.int32)
        positions = draft_positions(drafting.manifest, length, row_positions, following)
        runner = drafting.proposer.runner
        embeds = runner.embedding.lookup(torch.tensor(accepted.tokens))
        return drafting.proposer.extend(length, pages, embeds, runner.fuse(aux), positions)


def _deepstack_rows(prompt: Prompt, embeds: Tensor, start: int, stop: int) -> Tensor | None:
    """[L, S, H] of rows start..stop, zero at text rows; None where no visual row stands there."""
    visual = prompt.visual_rows[start:stop]
    if not visual.any():
        return None
    before = int(prompt.visual_rows[:start].sum())
    rows = embeds.new_zeros(prompt.deepstack.shape[0], stop - start, embeds.shape[1])
    rows[:, visual] = prompt.deepstack[:, before : before + int(visual.sum())].to(embeds.dtype)
    return rows
