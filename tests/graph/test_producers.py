"""A draft in every producer's own files runs as written: four chained steps and a tree, against
plain PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoint.drafts import Geometry, target_spec
from tests.checkpoint.test_draft import KINDS
from tests.graph.test_draft import CHAIN, PAGE_SIZE, TREE, DrawnRows
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.checkpoint.manifest import Eagle3Manifest
from trt_eagle3.checkpoint.tensor_index import TensorRef, open_index
from trt_eagle3.decode.forward.runner import DraftRunner
from trt_eagle3.decode.memory.state import layer_states
from trt_eagle3.drafts.eagle3.graph import draft_graph, fuse_graph
from trt_eagle3.drafts.eagle3.reference import Eagle3Reference
from trt_eagle3.engine.bundle.record import REFERENCE_ROOT, reference_location
from trt_eagle3.engine.runtime.embedding import EmbeddingTable
from trt_eagle3.engine.runtime.session import open_session


def open_runner(
    manifest: Eagle3Manifest, table: TensorRef, backend: str, folder: Path
) -> DraftRunner:
    sessions = []
    graphs = {
        "fuse": fuse_graph(manifest, "float32", reference_location),
        "draft": draft_graph(manifest, "float32", PAGE_SIZE, reference_location),
    }
    for name, model in graphs.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        sessions.append(open_session(backend, folder / f"{name}.onnx", REFERENCE_ROOT))
    states = layer_states(sessions[1].states, 8 * PAGE_SIZE)
    return DraftRunner(*sessions, states, EmbeddingTable(table, torch.float32), None)


def with_target_head(
    manifest: Eagle3Manifest, weights: Mapping[str, Tensor], folder: Path
) -> tuple[Eagle3Manifest, dict[str, Tensor]]:
    """A draft without a head of its own reads the target's."""
    if manifest.head == "own":
        return manifest, dict(weights)
    head = torch.randn(manifest.vocab_size, manifest.hidden_size)
    folder.mkdir()
    save_file({"lm_head.weight": head}, folder / "model.safetensors")
    tensors = {**manifest.tensors, **open_index(folder)}
    return dataclasses.replace(manifest, tensors=tensors), {**weights, "lm_head.weight": head}


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_draft_of_every_producer_equals_plain_pytorch(
    kind: str, parents: Sequence[int], backend: str, tmp_path: Path
) -> None:
    write, options, _ = KINDS[kind]
    weights = write(tmp_path / "draft", **options)
    geometry = options.get("geometry") or Geometry()
    manifest = read_draft(tmp_path / "draft", target_spec(geometry), cache=tmp_path / "cache")
    manifest, weights = with_target_head(manifest, weights, tmp_path / "head")
    rows = DrawnRows.draw(manifest, parents, seed=2)
    runner = open_runner(manifest, manifest.tensors["lm_head.weight"], backend, tmp_path)
    assert rows.error(runner, Eagle3Reference(manifest, weights)) < FLOAT32_TOLERANCE
