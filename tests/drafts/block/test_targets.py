"""Block drafts of every family that has published ones: answers are the target's alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tasks import examples

from tests.drafts.block.files import Geometry, write
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.moe import upcycled
from tests.qwen3 import save_qwen3
from tests.tiny import ROOT, TARGET, build_tiny
from trt_eagle3 import LLM

TRAINED = ROOT / "examples/tiny/dflash"
PROMPTS = [e.prompt for e in examples("heldout", 3, 30) if not (e.images or e.frames)][:4]
MAX_TOKENS = 24

Pair = tuple[Path, Path]


def of_qwen3(folder: Path) -> Pair:
    return save_qwen3(folder / "target"), TRAINED


def of_qwen3_moe(folder: Path) -> Pair:
    return upcycled(folder / "target", save_qwen3(folder / "dense")), TRAINED


def of_qwen3_vl_moe(folder: Path) -> Pair:
    return upcycled(folder / "target", TARGET), TRAINED


def of_hybrid(folder: Path, *, moe: bool) -> Pair:
    """A random hybrid, and a random draft with windows."""
    text = save_hybrid(folder / "target", moe=moe).config.text_config
    geometry = Geometry(
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        draft_vocab=text.vocab_size,
        target_layers=text.num_hidden_layers,
        num_aux=2,
    )
    write(folder / "draft", "z-lab dflash2", geometry, nested={"target_layer_ids": [1, 3]})
    return folder / "target", folder / "draft"


TRAINED_PAIRS = {"qwen3": of_qwen3, "qwen3_moe": of_qwen3_moe, "qwen3_vl_moe": of_qwen3_vl_moe}


def answers(pair: Pair, folder: Path, **changes: Any) -> tuple[list[tuple[int, ...]], list[int]]:
    """Tokens with the draft, which are those without it; and accepted lengths."""
    target, draft = pair
    speculation = {"steps": 5, "adaptive": False}
    bundle = build_tiny(folder, target=target, draft=draft, speculation=speculation, **changes)
    found, accepted = [], list[int]()
    with LLM(bundle) as engine:
        for prompt in PROMPTS:
            options: dict[str, Any] = {"max_tokens": MAX_TOKENS}
            drafted = engine.generate(prompt, **options)
            plain = engine.generate(prompt, speculation=False, **options)
            assert drafted.token_ids == plain.token_ids
            found.append(drafted.token_ids)
            accepted += drafted.accepted_lengths
    return found, accepted


@pytest.mark.parametrize("family", TRAINED_PAIRS)
def test_trained_draft_is_accepted_on_each_family_of_its_target(
    family: str, tmp_path: Path
) -> None:
    make: Callable[[Path], Pair] = TRAINED_PAIRS[family]
    _, accepted = answers(make(tmp_path), tmp_path / "engines")
    assert sum(accepted) / len(accepted) > 2


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("moe", [False, True])
def test_hybrid_answers_as_without_its_draft(*, moe: bool, backend: str, tmp_path: Path) -> None:
    found, _ = answers(
        of_hybrid(tmp_path, moe=moe), tmp_path / "engines", engine={"backend": backend}
    )
    assert len({token for tokens in found for token in tokens}) > 1
