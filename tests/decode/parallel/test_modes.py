"""Tokens of an engine of several ranks, in every way of decoding: those of a single one.

The ranks are threads of this process, and exchange what processes would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ThreadRanks
from tests.tiny import MIXTURE, ROOT, build_tiny
from trt_eagle3.decode.llm import LLM
from trt_eagle3.decode.loaded_bundle import LoadedBundle
from trt_eagle3.decode.memory import recurrent
from trt_eagle3.decode.memory.state import LayerStates
from trt_eagle3.decode.parallel.commands import Commit, Run
from trt_eagle3.decode.request.request import Request
from trt_eagle3.decode.sampling.grammar import Grammar
from trt_eagle3.decode.sampling.sampling_params import SamplingParams

DENSE, HYBRID = ROOT / "examples/tiny", ROOT / "examples/tiny_hybrid"
DYNAMIC = {"mode": "dynamic", "steps": 3, "topk": 3, "num_draft_tokens": 8}
TREE = {"mode": "tree", "steps": 3, "topk": 2, "num_draft_tokens": 7}
PROMPTS = ["What is 2 plus 3?", "Count from two to nine. Then name three colours, and two shapes."]
SCENE = DENSE / "images/scene.png"
MAX_TOKENS = 8

MODES: dict[str, tuple[int, Path, str, Mapping[str, Any]]] = {
    "chain": (2, DENSE, "draft", {"steps": 3}),
    "dynamic": (4, DENSE, "draft", DYNAMIC),
    "block": (2, DENSE, "dflash", {}),
    "experts": (4, MIXTURE, "draft", TREE),
    "recurrent": (4, HYBRID, "draft", TREE),
}
"""Ranks, pair, draft and speculation. The experts run in ``test_processes`` and on GPUs."""


def built(folder: Path, mode: str, device: str = "cpu") -> Path:
    _, pair, draft, speculation = MODES[mode]
    if draft != "draft":
        speculation = {"steps": 5, **speculation}
    return build_tiny(
        folder,
        target=pair / "target",
        draft=pair / draft,
        engine={"backend": "torch", "device": device, "prefill_chunk": 32, "page_size": 8},
        speculation=dict(speculation),
        # two sequences do not fit at once: one is preempted
        limits={"max_batch_size": 2, "max_seq_len": 64, "max_kv_tokens": 64},
    )


def answers(llm: LLM, *, images: bool) -> list[tuple[int, ...]]:
    """Token ids: greedy ones, sampled ones, those of a grammar, of a known prefix, of an image."""
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    greedy, sampled = SamplingParams(**options), SamplingParams(temperature=0.8, seed=3, **options)
    of_form = SamplingParams(grammar=Grammar.choice(["four cats", "fourteen"]))
    found = []
    for samplings in ((greedy, greedy), (sampled, of_form)):
        requests = [Request(p, sampling=s) for p, s in zip(PROMPTS, samplings, strict=True)]
        both = llm._started().submit_together(requests, keeps=llm)
        found += [answer.finish() for answer in both]
    found.append(llm.generate(f"{PROMPTS[1]} Please.", **options))
    if images:
        found.append(llm.generate("How many red squares?", images=[SCENE], **options))
    return [answer.token_ids for answer in found]


def of_ranks(bundle: Path, size: int, *, images: bool) -> tuple[list[tuple[int, ...]], ThreadRanks]:
    ranks = ThreadRanks(size)
    with LLM(replace(LoadedBundle.open(bundle), ranks=ranks)) as llm:
        found = answers(llm, images=images)
        metrics = llm.metrics()
    assert metrics.reused_tokens
    assert metrics.preempted or not images
    return found, ranks


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "experts"])
def test_ranks_emit_the_tokens_of_a_single_device(mode: str, tmp_path: Path) -> None:
    size, images = MODES[mode][0], mode == "chain"
    bundle = built(tmp_path, mode)
    with LLM(bundle) as llm:
        expected = answers(llm, images=images)
    found, ranks = of_ranks(bundle, size, images=images)
    assert found == expected
    kinds = {command.kind for command in ranks.commands if isinstance(command, Run)}
    assert kinds == {"run", "prompt"}
    commits = [command for command in ranks.commands if isinstance(command, Commit)]
    assert bool(commits) == (mode not in {"chain", "block"})


FAULTS = {
    "a rank keeps rejected rows": lambda m: m.setattr(
        LayerStates, "apply", _only_on_rank_0(LayerStates.apply)
    ),
    "a rank replays other rows": lambda m: m.setitem(recurrent._REPLAYS, "delta", lambda *_: None),
}


def _only_on_rank_0(right: Any) -> Any:
    def apply(states: LayerStates, moves: Any) -> None:
        if states._mirror is not None:
            right(states, moves)

    return apply


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_changes_tokens(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = built(tmp_path, "recurrent")
    FAULTS[fault](monkeypatch)
    found, _ = of_ranks(bundle, 2, images=False)
    with LLM(bundle) as llm:
        monkeypatch.undo()
        assert found != answers(llm, images=False)
