"""The graphs ``context`` and ``block`` against the reference, for every variant of a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.block import random_block
from tests.reference.checkpoint import file_name
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.decode.forward.block_runner import BlockRunner
from trt_eagle3.decode.forward.runner import AttentionMetadata, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.drafts.block.graph import block_graph, context_graph
from trt_eagle3.drafts.block.manifest import BlockLayer, BlockManifest
from trt_eagle3.drafts.block.reference import BlockReference
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.onnxruntime.session import OnnxRuntimeSession
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import Session
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.spec import RopeSpec

PAGE_SIZE, NUM_PAGES = 4, 16
CUDA_TOLERANCE = 2e-5
"""Of float32 products of another order of summation, as ``tests/drafts/mtp/test_cuda.py``."""
LENGTHS, FIRST_CHUNK, ROWS = (13, 6), 5, 5
"""Context rows of two sequences, rows of their first chunk, rows of a block."""

VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "causal": {"layers": (BlockLayer(causal=True, window=0),) * 2},
    "mixed masks": {
        "layers": (BlockLayer(causal=True, window=0), BlockLayer(causal=False, window=0))
    },
    "window by row": {
        "layers": (BlockLayer(causal=True, window=4), BlockLayer(causal=False, window=4))
    },
    "window by anchor": {
        "window_rule": "anchor",
        "layers": (BlockLayer(causal=False, window=4), BlockLayer(causal=False, window=0)),
    },
    "convolutions": {"method": "dflash2", "conv_kernel": 3, "conv_group": 8},
    "scales": {"embedding_scale": 3.0, "logit_multiplier": 0.5, "logit_softcap": 2.0},
    "bias, mask row, reduced vocabulary": {
        "attention_bias": True,
        "mask_embedding": "own",
        "draft_vocab_size": 20,
    },
    "partial rotary": {"rope": RopeSpec.plain(4, 10000.0), "shift": "next", "anchor_row": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Two sequences of context rows ``aux`` [n, k * H] and their anchors."""

    aux: tuple[Tensor, ...]
    anchors: tuple[int, ...] = (3, 7)

    @classmethod
    def draw(cls, m: BlockManifest) -> Case:
        generator = torch.Generator().manual_seed(5)
        width = len(m.aux_layers) * m.target_hidden_size
        return cls(tuple(torch.randn(n, width, generator=generator) for n in LENGTHS))


def open_block(
    reference: BlockReference,
    sessions: Callable[[Path, Path], Session],
    dtype: str = "float32",
    device: str = "cpu",
) -> BlockRunner:
    m, opened = reference.manifest, []
    models = {
        "context": context_graph(m, dtype, PAGE_SIZE, file_name),
        "block": block_graph(m, dtype, PAGE_SIZE, file_name),
    }
    for name, model in models.items():
        path = m.path / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        opened.append(sessions(path, m.path))
    states = layer_states(opened[1].states, NUM_PAGES * PAGE_SIZE, device)
    kind = dtype_named(dtype).torch
    table = EmbeddingTable(m.tensors["embed_tokens.weight"], kind, device)
    own, d2t = (reference.weights.get(name) for name in ("mask_embedding", "d2t"))
    own = None if own is None else own.to(device, kind)
    d2t = None if d2t is None else d2t.to(device)
    return BlockRunner(opened[0], opened[1], states, table, m, d2t, own)


def positions(starts: list[int], width: int) -> Tensor:
    rows = torch.tensor(starts)[:, None] + torch.arange(width)
    return rows.int().expand(3, -1, -1)


def run(runner: BlockRunner, case: Case) -> Tensor:
    """Logits [B, S, Vd] of a block of each sequence, over rows written in two chunks."""
    embedding = runner.embedding
    pool = PagePool(NUM_PAGES, PAGE_SIZE)
    tables = [PageTable(pool) for _ in LENGTHS]
    for count in range(1, max(LENGTHS) + ROWS + 1):  # pages alternate between the sequences
        for table, length in zip(tables, LENGTHS, strict=True):
            table.reserve(min(count, length + ROWS))
    pages = torch.nn.utils.rnn.pad_sequence(
        [t.pages(n + ROWS)[0] for t, n in zip(tables, LENGTHS, strict=True)], batch_first=True
    )

    def metadata(past: list[int], counts: list[int], width: int, mask: Tensor) -> AttentionMetadata:
        masks = mask.expand(len(past), -1, -1)
        inputs = {"page_table": pages}
        return AttentionMetadata(past, counts, inputs, masks, positions(past, width))

    for start, stops in ((0, [FIRST_CHUNK] * 2), (FIRST_CHUNK, list(LENGTHS))):
        width = max(stops) - start
        chunks = [a[start:stop] for a, stop in zip(case.aux, stops, strict=True)]
        aux = torch.stack([torch.nn.functional.pad(c, (0, 0, 0, width - len(c))) for c in chunks])
        counts = [len(c) for c in chunks]
        runner.write(
            aux.to(embedding.device, embedding.dtype),
            metadata([start] * 2, counts, width, causal_mask(width)),
        )
    causal = causal_mask(ROWS).expand(2, -1, -1)
    mask = causal if runner._manifest.is_causal else torch.ones_like(causal)
    tokens = torch.full((2, ROWS), runner._manifest.mask_token_id)
    tokens[:, 0] = torch.tensor(case.anchors)
    tokens = tokens.to(embedding.device)
    place = metadata(list(LENGTHS), [ROWS] * 2, ROWS, mask)
    rows = torch.arange(ROWS).expand(2, -1)
    return runner.forward(tokens, place, causal, rows)["logits"].cpu()


def expected(reference: BlockReference, case: Case) -> Tensor:
    found = [
        reference.block(anchor, len(aux), ROWS, reference.context(aux)).logits
        for aux, anchor in zip(case.aux, case.anchors, strict=True)
    ]
    return torch.stack(found)


@pytest.mark.parametrize("sessions", [OnnxRuntimeSession, TorchSession])
@pytest.mark.parametrize("variant", VARIANTS)
def test_block_equals_reference(tmp_path: Path, variant: str, sessions: type) -> None:
    reference = random_block(tmp_path, **VARIANTS[variant])
    case = Case.draw(reference.manifest)
    found = run(open_block(reference, sessions), case)
    assert relative_error(found, expected(reference, case)) < FLOAT32_TOLERANCE


BFLOAT16_TOLERANCE = 7e-2
"""Of relative errors of whole tensors; as of the target's layers (``families/qwen3_5``)."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_block_on_cuda_equals_reference(tmp_path: Path, variant: str, dtype: str) -> None:
    """Heads of 64, so that the kernels of half precision take them; twice: captured, then run."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    fields = {"rope": RopeSpec.plain(64, 10000.0), **VARIANTS[variant]}
    reference = random_block(tmp_path, head_dim=64, hidden_size=64, **fields)
    case = Case.draw(reference.manifest)
    runner = open_block(reference, partial(TorchSession, device="cuda"), dtype, "cuda")
    tolerance = CUDA_TOLERANCE if dtype == "float32" else BFLOAT16_TOLERANCE
    for _ in range(4):
        assert relative_error(run(runner, case), expected(reference, case)) < tolerance


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal instead of bidirectional": ("dflash", VARIANTS["causal"]),
    "window off by one": (
        "window by row",
        {"layers": (BlockLayer(causal=True, window=5), BlockLayer(causal=False, window=5))},
    ),
    "window by row instead of anchor": ("window by anchor", {"window_rule": "row"}),
    "the token's embedding in mask rows": (
        "bias, mask row, reduced vocabulary",
        {"mask_embedding": "token"},
    ),
    "no soft cap": ("scales", {"logit_softcap": 0.0}),
    "rotary fraction": ("partial rotary", {"rope": RopeSpec.plain(8, 10000.0)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(tmp_path: Path, fault: str) -> None:
    variant, change = FAULTS[fault]
    reference = random_block(tmp_path, **VARIANTS[variant])
    case = Case.draw(reference.manifest)
    wrong = dataclasses.replace(reference.manifest, **change)
    runner = open_block(dataclasses.replace(reference, manifest=wrong), OnnxRuntimeSession)
    if wrong.mask_embedding == "token":
        runner._mask_embedding = None
    assert relative_error(run(runner, case), expected(reference, case)) > FAULT_FLOOR
