"""P-EAGLE: a chain from one forward over mask rows, against the reference over all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.decode.check import Recomputed
from tests.decode.pair import (
    NUM_PAGES,
    PAGE_SIZE,
    PREFILL_CHUNK,
    Pair,
    Recorder,
    Run,
    make_pair,
    make_prompt,
    run,
    shuffled_pool,
)
from trt_eagle3.checkpoint.manifest import ParallelRows
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.decode.speculation.grow import DraftInputs, TreeGrower
from trt_eagle3.decode.speculation.open import open_drafter
from trt_eagle3.decode.speculation.tree import AnyTree, Tree

NUM_TOKENS, NUM_DRAFTS = 20, 4
CHAIN = Tree.from_paths([(0,) * depth for depth in range(1, NUM_DRAFTS + 1)])
PARALLEL = ParallelRows(mask_token_id=5, num_drafts=NUM_DRAFTS)

Chain = tuple[int, list[int]]
"""Rows before a chain, and its tokens, the root's first."""


@pytest.fixture(scope="module", params=[1, 2])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Pair:
    folder: Path = tmp_path_factory.mktemp("parallel")
    return make_pair(folder, seed=2, parallel=PARALLEL, num_layers=request.param, embedding="own")


def drafted(pair: Pair, layout: list[Any], patch: pytest.MonkeyPatch) -> tuple[Run, list[Chain]]:
    """A run with the chains that it drafted."""
    chains: list[Chain] = []
    grow = TreeGrower.grow

    def recorded(self: TreeGrower, tree: AnyTree, inputs: DraftInputs) -> Any:
        found = grow(self, tree, inputs)
        chains.append((int(inputs.num_computed_tokens[0]), found.tokens[0].tolist()))
        return found

    patch.setattr(TreeGrower, "grow", recorded)
    states = layer_states(pair.sessions["draft"].states, NUM_PAGES * PAGE_SIZE)
    drafter = open_drafter(
        pair.draft.manifest,
        [pair.sessions[name] for name in ("fuse", "draft")],
        states,
        pair.tables[1],
        {"mask_hidden": pair.draft.weights["mask_hidden"]},
        pair.d2t,
        max_rows=PREFILL_CHUNK,
        max_sequences=None,
        fixed_shapes=False,
    )
    prompt, recorder = make_prompt(pair, layout, seed=1), Recorder()
    decoder = pair.decoder(recorder, 96, drafter)
    passes: list[tuple[int, ...]] = []
    for tokens in decoder.run(pair.sequence(prompt, shuffled_pool(), drafting=True), CHAIN):
        passes.append(tokens)
        if sum(map(len, passes)) >= NUM_TOKENS:
            break
    return Run(pair, prompt, passes, recorder, pair.draft.manifest), chains


def wrong_drafts(run: Run, chains: list[Chain]) -> int:
    """Count drafted tokens that are not the likeliest of the reference over all rows."""
    whole, weights = Recomputed(run), run.pair.draft.weights
    mask = weights["embed_tokens.weight"][PARALLEL.mask_token_id].expand(NUM_DRAFTS - 1, -1)
    hidden = run.pair.draft.fuse(weights["mask_hidden"][0]).expand(NUM_DRAFTS - 1, -1)
    wrong = 0
    for length, (_, *tokens) in chains:
        if length > whole.num_rows:
            continue
        embeds = torch.cat([whole.embeds[:length], mask])
        features = torch.cat([whole.features[:length], hidden])
        rows = torch.arange(length + NUM_DRAFTS - 1)
        seen = rows[:, None] >= rows
        logits, _ = run.pair.draft.forward(embeds, features, whole.draft_positions(rows), seen)
        best = logits[length - 1 :].argmax(-1)
        d2t = run.pair.d2t
        wrong += sum(int(a + d2t[a]) != b for a, b in zip(best, tokens, strict=True))
    assert len(chains) > NUM_TOKENS // (NUM_DRAFTS + 1)
    return wrong


@pytest.mark.parametrize("layout", [[9], [3, (2, 3), 4]])
def test_chain_is_the_references_and_the_answer_the_targets(
    pair: Pair, layout: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, chains = drafted(pair, layout, monkeypatch)
    plain = run(pair, found.prompt, None, num_tokens=NUM_TOKENS)
    assert found.tokens[:NUM_TOKENS] == plain.tokens[:NUM_TOKENS]
    assert wrong_drafts(found, chains) == 0


def test_features_of_the_last_row_in_mask_rows_are_caught(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = TreeGrower._fill_at_once

    def fed(self: TreeGrower, tree: Tree, inputs: DraftInputs, mask: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self._runner, "fuse", lambda _: inputs.features[:, None])
            return fill(self, tree, inputs, mask)

    monkeypatch.setattr(TreeGrower, "_fill_at_once", fed)
    assert wrong_drafts(*drafted(pair, [9], monkeypatch)) > 0
