"""Random Qwen3-MoEs of odd geometry, as transformers writes them, against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.graph.test_target import PAGE_SIZE
from tests.moe import save_qwen3_moe, with_layout
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import target_from_dict, target_to_dict
from trt_eagle3.engine.torch.session import TorchSession
from trt_eagle3.families.registry import family_of, read_target
from trt_eagle3.graph.residual import Residual
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.spec import DenseMlp, SparseMoe

IDS = torch.randint(40, (17,), generator=torch.Generator().manual_seed(1))
GEOMETRIES: dict[str, dict[str, Any]] = {
    "all layers sparse": {},
    "every second layer sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "dense layers named": {"mlp_only_layers": [0, 2], "num_experts_per_tok": 5},
    "one expert a token, not renormalised": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "tied head, biases, more for a token": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 28,
    },
}


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = save_qwen3_moe(tmp_path, **GEOMETRIES[name])
    spec = read_target(tmp_path)
    assert family_of(spec).title == "Qwen3-MoE"
    expected = model(IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("layout", ["transposed", "fp8 single", "fp8 transposed"])
def test_graph_over_another_layout_equals_the_reference(layout: Any, tmp_path: Path) -> None:
    with_layout(tmp_path, save_qwen3_moe(tmp_path), layout)
    spec = read_target(tmp_path)
    expected = reference_logits(spec, IDS)
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE


def test_sparse_layers_are_those_of_transformers(tmp_path: Path) -> None:
    changes = {"decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}
    model = save_qwen3_moe(tmp_path, **changes)
    spec = read_target(tmp_path)
    found = [isinstance(layer.mlp, SparseMoe) for layer in spec.layers]
    assert found == [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert found == [False, True, False, False, False, True]
    assert spec.layers[1].mlp == SparseMoe(5, 2, 20, renormalise=True)
    assert spec.layers[0].mlp == DenseMlp(36)
    assert target_from_dict(target_to_dict(spec)).layers == spec.layers


def test_head_size_that_the_config_leaves_out_is_that_of_the_heads(tmp_path: Path) -> None:
    """As transformers takes it in mixtures of experts; of dense Qwen3 it is 128."""
    model = save_qwen3_moe(tmp_path, head_dim=None, hidden_size=32)
    assert model.model.layers[0].self_attn.head_dim == 8
    assert read_target(tmp_path).attention.head_dim == 8


def test_trace_has_what_the_router_says_and_the_graphs_names(tmp_path: Path) -> None:
    save_qwen3_moe(tmp_path)
    spec = read_target(tmp_path)
    reference = load_reference(spec, torch.float32, "cpu")
    embeds = torch.randn(5, spec.hidden_size)
    (layer,) = reference.layers([1])
    trace = layer.trace(embeds, reference.rope(torch.arange(5).expand(3, -1)))
    assert trace["layers.1.mlp.router_logits"].shape == (5, 5)
    assert trace["layers.1.mlp.output"].shape == embeds.shape
    graph = target_graph(spec, (), False, "float32", PAGE_SIZE, lambda _: "x")
    names = {name for node in graph.graph.node for name in node.output}
    assert {name for name in trace if name.startswith("layers.1.")} <= names


def last_logits(folder: Path, residual: Residual) -> Tensor:
    """Of one token by the torch session."""
    spec = read_target(folder)
    graph = target_graph(
        spec, (), False, "float32", PAGE_SIZE, lambda r: r.file.name, residual=residual
    )
    (folder / "model.onnx").write_bytes(graph.SerializeToString())
    session = TorchSession(folder / "model.onnx", folder)
    caches = {state.name: torch.zeros(2 * PAGE_SIZE, *state.shape) for state in session.states}
    whole = {name: torch.zeros(1, dtype=torch.int32) for name in ("past_lengths",)}
    found = session.run(
        {
            "inputs_embeds": torch.linspace(-2, 2, spec.hidden_size)[None, None],
            "position_ids": torch.zeros(3, 1, 1, dtype=torch.int32),
            "query_lengths": torch.ones(1, dtype=torch.int32),
            "page_table": torch.ones(1, 1, dtype=torch.int32),
            "tree_mask": torch.ones(1, 1, 1, dtype=torch.bool),
            "logit_rows": torch.zeros(1, 1, dtype=torch.int32),
            **whole,
            **caches,
        }
    )
    return found["logits"]


def test_wide_residual_scales_what_experts_add(tmp_path: Path) -> None:
    """Experts whose ``up`` did not carry the factor would count 64 times."""
    save_qwen3_moe(tmp_path)
    narrow, wide = (last_logits(tmp_path, Residual(wide=wide)) for wide in (False, True))
    assert relative_error(wide, narrow) < FLOAT32_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("fault", ["next expert", "gate and up exchanged", "not renormalised"])
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    model = save_qwen3_moe(tmp_path)
    found = graph_logits(read_target(tmp_path), IDS)
    for layer in model.model.layers:
        if fault == "next expert":
            layer.mlp.experts.gate_up_proj.data = layer.mlp.experts.gate_up_proj.roll(1, 0)
        elif fault == "gate and up exchanged":
            layer.mlp.experts.gate_up_proj.data = layer.mlp.experts.gate_up_proj.roll(20, 1)
        else:
            layer.mlp.gate.norm_topk_prob = False
    assert relative_error(found, model(IDS[None]).logits[0]) > FAULT_FLOOR
