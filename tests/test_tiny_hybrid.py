"""The recipe of the tiny hybrid pair, before any training: its forward is transformers', its MTP
head is the program's, and what it writes loads, builds and decodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from check import _inputs
from evaluate import Pair
from export import rounded, save_draft
from hybrid import AUX_LAYERS, MtpHead, hybrid_forward, mtp_forward
from model import Draft
from prompt import SPECIAL
from tasks import examples
from tokenizers import Tokenizer
from train import VOCAB_ROWS
from train_hybrid import DRAFT_WIDTH, begun, save_hybrid

from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from tests.tiny import TARGET, build_tiny
from trt_eagle3 import LLM
from trt_eagle3.drafts.mtp.reference import MtpReference
from trt_eagle3.drafts.registry import find_draft
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.metrics import relative_error


class Recipe:
    """What the recipe begins with, and where it was saved."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        self.target: Any = rounded(begun(TARGET))
        self.head = MtpHead(self.target)
        rounded(self.head)
        save_hybrid(folder / "target", self.target, self.head, self.tokenizer)
        ids = {token: self.tokenizer.token_to_id(token) for token in SPECIAL}
        drafted = torch.arange(0, VOCAB_ROWS, 6)[:120]
        draft = Draft(len(drafted), intermediate=DRAFT_WIDTH)
        save_draft(folder / "draft", draft, drafted, VOCAB_ROWS, ids, AUX_LAYERS, "qwen3_5")

    def inputs(self, kinds: tuple[Any, ...]) -> list[tuple[dict[str, Any], Any]]:
        """transformers' arguments and the recipe's batch, of an example of each kind."""
        pair = Pair(self.tokenizer, self.target, None, torch.zeros(0), torch.device("cpu"))
        drawn = (next(iter(examples("heldout", 3, 1, (kind,)))) for kind in kinds)
        made = (_inputs(pair, example) for example in drawn)
        return [(inputs, batch) for inputs, _, batch in made]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return Recipe(tmp_path_factory.mktemp("recipe"))


@torch.no_grad()
def test_forward_is_that_of_transformers(recipe: Recipe) -> None:
    for inputs, batch in recipe.inputs(("text", "two_images", "frames")):
        expected = recipe.target(**inputs).logits
        out = hybrid_forward(recipe.target, batch)
        assert relative_error(recipe.target.lm_head(out.hidden), expected) < 5 * FLOAT32_TOLERANCE
        assert out.aux.shape[-1] == 3 * out.hidden.shape[-1]


@torch.no_grad()
def test_mtp_head_computes_what_the_program_reads(recipe: Recipe) -> None:
    """A step over all rows behind an image, and a chained one behind the last of them."""
    ((_, batch),) = recipe.inputs(("image",))
    out = mtp_forward(recipe.target, batch)
    shifted = torch.cat([out.embeds[:, 1:], out.embeds[:, -1:]], dim=1)
    hidden, keys = recipe.head.first(out.aux, shifted, batch.positions)
    count = hidden.shape[1]
    rows = torch.tensor([[count - 1]])
    token = recipe.target.model.language_model.embed_tokens(torch.tensor([[7]]))
    position = batch.positions[0].gather(1, rows) + 1
    chained = recipe.head.next(hidden[:, -1:], token, position, rows, keys)

    reference = MtpReference.load(
        find_draft("mtp", read_target(recipe.folder / "target"), {}), torch.float32
    )
    causal = torch.ones(count, count).tril().bool()
    features = reference.fuse(out.aux[0])
    first = reference.run(shifted[0], features, batch.positions[:, 0], causal)
    mask = torch.ones(1, count + 1).bool()
    then = reference.run(token[0], first.features[-1:], position.expand(3, -1), mask, first.memory)
    for ours, theirs in ((hidden[0], first), (chained[0], then)):
        error = relative_error(recipe.head.logits(ours), theirs.logits)
        assert error < 5 * FLOAT32_TOLERANCE
    late = reference.run(
        token[0], first.features[-1:], position.expand(3, -1) + 1, mask, first.memory
    )
    assert relative_error(recipe.head.logits(chained[0]), late.logits) > FAULT_FLOOR


@pytest.mark.parametrize("draft", ["draft", "mtp"])
def test_what_it_writes_builds_and_decodes(draft: str, recipe: Recipe, tmp_path: Path) -> None:
    target = recipe.folder / "target"
    named: Any = "mtp" if draft == "mtp" else recipe.folder / draft
    with LLM(build_tiny(tmp_path, target=target, draft=named)) as engine:
        assert engine.bundle.spec.family == "qwen3_5"
        plain, drafted = (
            engine.generate("What is 12 plus 30?", max_tokens=8, speculation=on)
            for on in (False, True)
        )
    assert drafted.token_ids == plain.token_ids


def test_pair_is_small(recipe: Recipe) -> None:
    files = [f for name in ("target", "draft") for f in (recipe.folder / name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12_000_000
