"""A prompt of 4,096 tokens and what follows it, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hybrid import save_qwen3_5_moe_text, save_qwen3_5_text
from tests.reference.checkpoint import file_name
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.decode.forward.runner import AttentionMetadata, TargetRunner, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.recurrent import RecurrentStates
from trt_eagle3.decode.memory.state import LayerStates, PagedStates
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error

PAGE_SIZE, NUM_PAGES = 64, 66
PROMPT, FOLLOWING = 4096, 4
IDS = torch.randint(40, (PROMPT + FOLLOWING,), generator=torch.Generator().manual_seed(1))
TOLERANCE = 2e-5
"""Of logits; seen: 5.0e-6."""
FAULT_FLOOR = 20 * TOLERANCE
SESSIONS = {"onnxruntime": OnnxRuntimeSession, "torch": TorchSession}
CHUNKS = {"onnxruntime": 512, "torch": 1500}
SAVED: dict[str, Callable[..., Any]] = {"dense": save_qwen3_5_text, "moe": save_qwen3_5_moe_text}
SIZES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


@dataclass(frozen=True)
class Long:
    """A target, and transformers' logits of its last rows."""

    spec: TargetCheckpoint
    logits: Tensor


@cache
@torch.no_grad()
def long(kind: str) -> Long:
    folder = Path(mkdtemp(prefix="trt-eagle3-test-"))
    model = SAVED[kind](folder, **SIZES, num_hidden_layers=3, max_position_embeddings=8192)
    spec = read_target(folder)
    graph = target_graph(spec, (), False, "float32", PAGE_SIZE, file_name)
    (folder / "target.onnx").write_bytes(graph.SerializeToString())
    return Long(spec, model(IDS[None], logits_to_keep=FOLLOWING + 1).logits[0])


class OneSequence:
    """What states know of a sequence that has all pages."""

    def __init__(self) -> None:
        self.pages = PageTable(PagePool(NUM_PAGES, PAGE_SIZE))


@torch.no_grad()
def computed(kind: str, backend: str) -> Tensor:
    """Logits after the prompt, in chunks, and after each token that follows it, one by one."""
    spec = long(kind).spec
    session = SESSIONS[backend](spec.path / "target.onnx", spec.path)
    table = EmbeddingTable(spec.tensors["embed_tokens.weight"], torch.float32)
    paged, kept = ([s for s in session.states if (s.kind == "paged") is p] for p in (True, False))
    states = LayerStates(PagedStates(paged, NUM_PAGES * PAGE_SIZE), RecurrentStates(kept, 1, 0))
    runner = TargetRunner(session, states, table, 0)
    sequence: Any = OneSequence()
    states.reserve(sequence, len(IDS))
    cuts = [*range(0, PROMPT, CHUNKS[backend]), *range(PROMPT, len(IDS) + 1)]
    found = []
    for start, stop in pairwise(cuts):
        count = stop - start
        place = AttentionMetadata(
            past=[start],
            counts=[count],
            state_inputs=states.inputs([sequence], [stop], certain=[count]),
            mask=causal_mask(count)[None],
            positions=torch.arange(start, stop, dtype=torch.int32).repeat(3, 1)[:, None],
        )
        embeds = runner.embedding.lookup(IDS[start:stop])[None]
        levels = torch.zeros(0, 1, count, spec.hidden_size)
        logits, _ = runner.forward(embeds, place, torch.tensor([[count - 1]]), levels)
        states.swap_entries([sequence])
        if stop >= PROMPT:
            found.append(logits[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize(("kind", "backend"), [("dense", "onnxruntime"), ("moe", "torch")])
def test_long_prompt_gives_the_logits_of_transformers(kind: str, backend: str) -> None:
    assert relative_error(computed(kind, backend), long(kind).logits) < TOLERANCE


def _in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    right = RecurrentStates.swap_entries

    def swap_entries(self: RecurrentStates, *args: Any) -> None:
        right(self, *args)
        for layers in self._layers:
            if layers.specs[0].kind == "delta":
                layers.buffer.copy_(layers.buffer.bfloat16())

    patch.setattr(RecurrentStates, "swap_entries", swap_entries)


def _without_positions(patch: pytest.MonkeyPatch) -> None:
    """Each chunk turns by positions from 0."""
    right = TargetRunner.forward

    def forward(self: TargetRunner, embeds: Tensor, place: Any, *args: Any) -> Any:
        positions = place.positions - place.positions[:, :, :1]
        object.__setattr__(place, "positions", positions)
        return right(self, embeds, place, *args)

    patch.setattr(TargetRunner, "forward", forward)


FAULTS = {"states in bfloat16": _in_bfloat16, "positions of the chunk": _without_positions}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    assert relative_error(computed("moe", "torch"), long("moe").logits) > FAULT_FLOOR
