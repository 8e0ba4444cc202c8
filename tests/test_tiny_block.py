"""The trained block drafts of the tiny pairs, as saved: the reference proposes what the recipe's
code proposes, and the target accepts more than of the pair's EAGLE-3 draft.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from evaluate import Pair, chain, load_pair
from evaluate_hybrid import load_hybrid_pair
from prompt import Encoded, encode, prompt_text
from tasks import KINDS, examples

from tests.tiny import ROOT
from trt_eagle3.drafts.block.reader import read_block
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.families.registry import read_target

CPU = torch.device("cpu")
DENSE, HYBRID = ROOT / "examples/tiny", ROOT / "examples/tiny_hybrid"
DRAFTS = {"dflash": DENSE, "dspark": DENSE, "dflash2": HYBRID}
PER_KIND = 3
SEED = 17


@cache
def pair(folder: Path, name: str) -> Pair:
    """A target with one of its drafts; ``draft`` is the EAGLE-3 draft."""
    return load_hybrid_pair(name) if folder == HYBRID else load_pair(folder, CPU, name)


@cache
def questions() -> tuple[Encoded, ...]:
    tokenizer = pair(DENSE, "dflash").tokenizer
    drawn = (e for kind in KINDS for e in examples("heldout", SEED, PER_KIND, (kind,)))
    return tuple(encode(tokenizer, e, prompt_text(e)) for e in drawn)


@cache
def acceptance_length(folder: Path, name: str) -> float:
    """Mean of tokens emitted per verify, over all questions."""
    gained = [tokens for q in questions() for tokens in chain(pair(folder, name), q)[1]]
    return sum(gained) / len(gained)


@pytest.mark.parametrize("name", DRAFTS)
def test_more_is_accepted_than_of_the_eagle3_draft(name: str) -> None:
    folder = DRAFTS[name]
    assert acceptance_length(folder, name) > acceptance_length(folder, "draft")


@torch.no_grad()
@pytest.mark.parametrize("name", DRAFTS)
def test_reference_proposes_what_the_recipe_proposes(name: str) -> None:
    folder = DRAFTS[name]
    found = pair(folder, name)
    target = found.target
    table, head = target.model.language_model.embed_tokens.weight, target.lm_head.weight
    manifest = read_block(folder / name, read_target(folder / "target"))
    reference = BlockReference.load(manifest, embedding=table)
    reference = replace(reference, weights={"lm_head.weight": head, **reference.weights})
    assert manifest.block_size == found.draft.shape.block_size
    assert manifest.drafts_of(manifest.block_size) == found.num_drafts
    for question in questions():
        batch = found.prompt_batch([question])
        known = question.prompt_len + 2  # the last of them is the anchor
        batch.ids[0, :known] = torch.tensor(question.ids[:known])
        out = found.forward(batch.trimmed(known))
        theirs = found.drafts(found, batch, out, known)
        anchor = int(batch.ids[0, known - 1])
        context = reference.context(out.aux[0, : known - 1])
        rows = reference.block(anchor, known - 1, manifest.block_size, context)
        assert list(reference.propose(anchor, rows).tokens) == theirs
