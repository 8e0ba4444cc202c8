"""A random MTP head by the torch session on CUDA against the formula in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafts.mtp.head import add_head, read_head
from tests.hybrid import ROPE, save_qwen3_5_moe_text, save_qwen3_5_text
from tests.reference.checkpoint import file_name
from trt_eagle3.decode.forward.runner import AttentionMetadata, DraftRunner, all_rows, causal_mask
from trt_eagle3.decode.memory.kv_cache import PagePool, PageTable
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.drafts.mtp.reference import MtpReference
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.dtype import dtype_named
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.metrics import relative_error

pytestmark = pytest.mark.gpu

PAGE_SIZE = 16
TOLERANCES = {"float32": 2e-5, "bfloat16": 7e-2}
"""Of relative errors of whole tensors; as of the target's layers (``families/qwen3_5``)."""
GEOMETRY: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 64,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2]},
}
TARGETS = {"dense": save_qwen3_5_text, "moe": save_qwen3_5_moe_text}


@pytest.mark.parametrize(
    ("target", "dtype"),
    # a mixture in 16 bits may choose another expert where two are about as probable
    [("dense", "float32"), ("dense", "bfloat16"), ("moe", "float32")],
)
@pytest.mark.parametrize("rows", [1, 5, 150])
def test_cuda_equals_the_formula(target: str, rows: int, dtype: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    TARGETS[target](tmp_path, **GEOMETRY)
    manifest = read_head(add_head(tmp_path))
    sessions = []
    for name, graph in kind_of(manifest).graphs(manifest, dtype, PAGE_SIZE, file_name).items():
        (tmp_path / f"{name}.onnx").write_bytes(graph.SerializeToString())
        sessions.append(TorchSession(tmp_path / f"{name}.onnx", tmp_path, device="cuda"))
    fuse, draft = sessions
    kind = dtype_named(dtype).torch
    table = EmbeddingTable(read_target(tmp_path).tensors["embed_tokens.weight"], kind, "cuda")
    states = layer_states(draft.states, 12 * PAGE_SIZE, "cuda")
    runner = DraftRunner(fuse, draft, states, table, None)
    generator = torch.Generator().manual_seed(3)
    embeds, hidden = torch.randn(2, rows, 64, generator=generator)
    positions = torch.arange(rows).expand(3, -1)
    reference = MtpReference.load(manifest, torch.float32)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    expected = reference.run(embeds, reference.fuse(hidden), positions, mask)
    pages = PageTable(PagePool(12, PAGE_SIZE))
    pages.reserve(rows)
    metadata = AttentionMetadata.single(0, pages.pages(rows), causal_mask(rows), positions.int())
    features = runner.fuse(hidden.to("cuda", kind))
    logits, out = runner.forward(
        embeds.to("cuda", kind)[None], features[None], metadata, all_rows(1, rows)
    )
    assert relative_error(logits[0].cpu(), expected.logits) < TOLERANCES[dtype]
    assert relative_error(out[0].float().cpu(), expected.features) < TOLERANCES[dtype]
