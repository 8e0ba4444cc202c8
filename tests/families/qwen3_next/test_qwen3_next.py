"""Random Qwen3-Nexts through the whole program, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3NextForCausalLM

from tests.calibration.conftest import forward, text_prompts
from tests.drafts.mtp.head import add_head
from tests.engine.torch.test_packed import values_of
from tests.families.gates import failed, validate_pair
from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.families.qwen3_next.random_pair import DRAFTS, GEOMETRIES, save_qwen3_next
from tests.families.random_pairs import config_of
from tests.families.test_readers import changed
from tests.families.text_pairs import (
    PROMPT,
    answer_of,
    check_conversation,
    check_refused,
    check_speculation,
    save_answer_pairs,
)
from tests.graph.test_target import PAGE_SIZE
from tests.moe import quantised, with_layout
from tests.quantised import PACKERS
from tests.reference.checkpoint import file_name
from tests.reference.compare import FAULT_FLOOR, FLOAT32_TOLERANCE
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.calibration.run import calibrate
from trt_eagle3.checkpoint.target import target_from_dict, target_to_dict
from trt_eagle3.cli import cli
from trt_eagle3.drafts.registry import find_draft
from trt_eagle3.engine.builder.weight_quantiser import quantise_target
from trt_eagle3.engine.torch.pack import pack
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.delta_net import DeltaNet
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.trt_export import check_plugins, trt_export
from trt_eagle3.graph.weights import external_weights
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.reference.dequantise import read_values
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

IDS = torch.randint(300, (17,), generator=torch.Generator().manual_seed(1))
FUSED = "layers.0.linear_attn.in_proj_qkvz.weight"
PROJECTIONS = ("_proj.weight", "in_proj_qkvz.weight")
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}
"""Columns of whole groups of 64. Head boundaries are in the middle of blocks of 128 rows."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head, and drafts of two producers that know the tokens of its answer."""
    folder = save_answer_pairs(tmp_path_factory.mktemp("next"), save_qwen3_next, DRAFTS)
    add_head(folder / "target")
    return folder


@pytest.fixture(scope="module")
def answer(root: Path) -> tuple[int, ...]:
    """transformers' tokens."""
    return answer_of(Qwen3NextForCausalLM.from_pretrained(root / "target").eval(), root / "target")


def published(config: dict[str, Any]) -> None:
    """Qwen3-Next's config as on the Hub, by transformers 4.57."""
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    config |= {"rope_scaling": None, "full_attention_interval": 4, "use_sliding_window": False}
    config["torch_dtype"] = config.pop("dtype")


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = save_qwen3_next(tmp_path, name, num_hidden_layers=4)
    spec = read_target(tmp_path)
    expected = model(IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    again = target_from_dict(json.loads(json.dumps(target_to_dict(spec))))
    assert again.layers == spec.layers


@pytest.mark.parametrize("layout", ["stacked", "transposed", "fp8 stacked"])
@torch.no_grad()
def test_graph_over_another_layout_equals_the_reference(layout: Any, tmp_path: Path) -> None:
    """transformers 4.57 and 5.x write experts one by one; their memory in 5.x is stacked."""
    model = save_qwen3_next(tmp_path, num_hidden_layers=4)
    with_layout(tmp_path, model, layout)
    spec = read_target(tmp_path)
    expected = reference_logits(spec, IDS)
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    if not layout.startswith("fp8"):
        assert relative_error(model(IDS[None]).logits[0], expected) < FLOAT32_TOLERANCE


@torch.no_grad()
def test_fp8_is_read_as_published(tmp_path: Path) -> None:
    """Blocks with scales in bfloat16, experts one by one; in_proj_ba and gates stay as they are."""
    model = save_qwen3_next(tmp_path, num_hidden_layers=4)
    file = add_head(tmp_path) / "model.safetensors"
    head = {name: tensor for name, tensor in load_file(file).items() if "mtp." in name}
    with_layout(tmp_path, model, "fp8 single")
    tensors = load_file(file) | head
    for name in [n for n in tensors if n.endswith(PROJECTIONS) and tensors[n].element_size() > 1]:
        codes, scales = quantised(tensors[name])
        tensors |= {name: codes, f"{name}_scale_inv": scales.bfloat16()}
    save_file(tensors, file, {"format": "pt"})
    spec = read_target(tmp_path)
    assert spec.tensors[FUSED].dtype == "F8_E4M3"
    assert spec.tensors[FUSED.replace("qkvz", "ba")].dtype == "F32"
    assert relative_error(graph_logits(spec, IDS), reference_logits(spec, IDS)) < FLOAT32_TOLERANCE
    experts = find_draft("mtp", spec, {}).tensors["layers.0.mlp.experts.gate_up_proj"]
    assert experts.dtype == "F8_E4M3"


def packed(folder: Path, name: str) -> None:
    """Pack the projections of a checkpoint, the fused ones too."""
    packer, claim = PACKERS[name]
    file, tensors = folder / "model.safetensors", dict[str, Tensor]()
    for stored, tensor in load_file(file).items():
        if stored.endswith(PROJECTIONS) and "layers" in stored:
            module = stored.removesuffix(".weight")
            made = packer(tensor)
            tensors |= {f"{module}.{last}": value.contiguous() for last, value in made.items()}
        else:
            tensors[stored] = tensor
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))


@pytest.mark.parametrize("name", ["fp8", "fp8-channel", "w4a16", "gptq", "awq", "modelopt-nvfp4"])
@torch.no_grad()
def test_graph_over_quantised_fused_projections_equals_the_reference(
    name: str, tmp_path: Path
) -> None:
    save_qwen3_next(tmp_path, **WIDE)
    packed(tmp_path, name)
    spec = read_target(tmp_path)
    assert relative_error(graph_logits(spec, IDS), reference_logits(spec, IDS)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("name", ["fp8", "fp8-channel", "int8", "w4a16", "awq", "modelopt-nvfp4"])
@torch.no_grad()
def test_fused_projection_is_packed_for_the_kernels_in_order(name: str, tmp_path: Path) -> None:
    model = save_qwen3_next(tmp_path, **WIDE)
    packed(tmp_path, name)
    spec = read_target(tmp_path)
    graph = target_graph(spec, (), False, "bfloat16", PAGE_SIZE, file_name)
    expr = external_weights(graph)["layers.0.linear_attn.qkvz.weight"]
    weight = pack(expr, tmp_path, torch.device("cpu"))
    assert weight is not None
    mixer = model.model.layers[0].linear_attn
    stored = read_values(spec.tensors[FUSED]).T[None]  # inputs as tokens of a batch
    q, k, v, z, *_ = mixer.fix_query_key_value_ordering(stored, torch.zeros(1, len(stored[0]), 12))
    expected = torch.cat([part.flatten(2) for part in (q, k, v, z)], dim=-1)[0].T
    torch.testing.assert_close(values_of(weight), expected, rtol=2e-7, atol=0)


@torch.no_grad()
def test_projection_in_the_stored_order_is_caught(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_target(root / "target")
    expected = reference_logits(spec, IDS)
    ranges = DeltaNet._rows_by_kind
    monkeypatch.setattr(DeltaNet, "_rows_by_kind", lambda *args: sorted(ranges(*args)))
    assert relative_error(graph_logits(spec, IDS), expected) > FAULT_FLOOR


def test_published_spelling_is_the_same_target(root: Path, tmp_path: Path) -> None:
    folder = changed(root / "target", tmp_path / "target", published)
    assert target_to_dict(read_target(folder)) == target_to_dict(read_target(root / "target"))


def test_trace_has_the_graphs_names(root: Path) -> None:
    spec = read_target(root / "target")
    reference = load_reference(spec, torch.float32, "cpu")
    rope = reference.rope(torch.arange(5).expand(3, -1))
    graph = target_graph(spec, (), False, "float32", PAGE_SIZE, lambda _: "x")
    names = {name for node in graph.graph.node for name in node.output}
    layer = next(reference.layers([0]))
    trace = layer.trace(torch.randn(5, spec.hidden_size), rope)
    assert {name for name in trace if name.startswith("layers.")} <= names
    assert {"layers.0.linear_attn.qkvz", "layers.0.linear_attn.ba"} <= trace.keys()


def test_conversation_equals_transformers(root: Path) -> None:
    check_conversation(root / "target")


@pytest.mark.parametrize(
    ("draft", "backend"), [("safeailab", "onnxruntime"), ("specforge", "torch")]
)
def test_speculative_equals_autoregressive_equals_transformers(
    draft: str, backend: str, root: Path, answer: tuple[int, ...], tmp_path: Path
) -> None:
    check_speculation(root / "target", root / draft, tmp_path, backend, answer)


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_mtp_head_drafts_the_same_answer(
    backend: str, root: Path, answer: tuple[int, ...], tmp_path: Path
) -> None:
    engine = {"prefill_chunk": 64, "backend": backend}
    sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
    with LLM(build(config_of(root / "target", Path("mtp"), tmp_path, engine=engine)).path) as llm:
        drafted = llm.generate(PROMPT, sampling=sampling)
    assert drafted.acceptance_length is not None
    assert drafted.token_ids == answer


@pytest.mark.parametrize(("draft", "backend"), [("specforge", "onnxruntime"), ("mtp", "torch")])
def test_every_gate_holds(draft: str, backend: str, root: Path, tmp_path: Path) -> None:
    engine = {"prefill_chunk": 64, "backend": backend}
    checkpoint = Path("mtp") if draft == "mtp" else root / draft
    bundle = build(config_of(root / "target", checkpoint, tmp_path, engine=engine)).path
    found = validate_pair(bundle, [Question(PROMPT)])
    assert failed(found) == []
    names = ("processor.token_ids", "target.logits_l2", "draft.logits", "tokens.speculative")
    assert all(found.recorder[name].worst is not None for name in names)


def test_every_gate_holds_quantised_by_the_build(root: Path, tmp_path: Path) -> None:
    engine = {"prefill_chunk": 64, "backend": "torch", "weights": "fp8", "kv_dtype": "fp8"}
    bundle = build(config_of(root / "target", root / "safeailab", tmp_path, engine=engine)).path
    with safe_open(bundle / "weights/target/quantised-fp8.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds[f"model.{FUSED}"] == "F8_E4M3"
    assert kinds[f"model.{FUSED.replace('qkvz', 'ba')}"] == "F32"
    found = validate_pair(bundle, [Question(PROMPT)], made_from=read_target(root / "target"))
    assert failed(found) == []


@torch.no_grad()
def test_calibrated_target_errs_less_than_data_free(tmp_path: Path) -> None:
    save_qwen3_next(tmp_path / "target", **WIDE, vocab_size=512)
    spec = read_target(tmp_path / "target")
    prompts = text_prompts(8, 64)
    calibration = calibrate(spec, prompts, "cpu", tmp_path)
    assert FUSED in calibration.weights
    expected = forward(spec, prompts).layers
    errors = []
    for i, own in enumerate((calibration, None)):
        made = quantise_target(spec, "int4", tmp_path / f"{i}.safetensors", calibration=own)
        found = forward(made, prompts).layers
        errors.append([relative_error(*pair) for pair in zip(found, expected, strict=True)])
    assert all(ours < theirs for ours, theirs in zip(*errors, strict=True)), errors


def test_tensorrt_has_plugins_for_all_of_it(root: Path, tmp_path: Path) -> None:
    graph = target_graph(read_target(root / "target"), (), False, "float16", 16, lambda _: "x")
    check_plugins(graph)
    kinds = [node.op_type for node in trt_export(graph).model.graph.node]
    assert kinds.count("GatedDelta") == 6
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    pair = config_of(root / "target", root / "safeailab", tmp_path, engine=engine)
    assert "target" in (build(pair).path / "build_engine.sh").read_text()


@pytest.mark.parametrize("draft", [*DRAFTS, "mtp"])
def test_inspect_names_family_layers_and_producer(draft: str, root: Path) -> None:
    named = "mtp" if draft == "mtp" else str(root / draft)
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), named])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Qwen3-Next, 7 layers" in words
    assert "6 layers of linear attention, 2/6 heads of 12/20, convolution of 3" in words
    assert "7 layers of 5 experts of 16, 2 per token, renormalised, and a shared one of 28" in words
    producer = "MTP head by qwen3_next" if draft == "mtp" else f"by {draft}"
    assert producer.lower() in words.lower()


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "key heads": (
        _set(linear_num_key_heads=3),
        "layers.0.linear_attn.in_proj_qkvz.weight: expected shape [312, 48] for 3 key heads of 12 "
        "and 6 value heads of 20, got [288, 48]. Correct linear_num_key_heads",
    ),
    "groups": (
        _set(linear_num_value_heads=5),
        "linear_num_value_heads: expected a multiple of linear_num_key_heads 2, got 5",
    ),
    "layer types": (
        _set(layer_types=["full_attention"] * 7),
        "layer_types: layer 0 is full_attention, and the checkpoint has layers.0.linear_attn.",
    ),
    "window": (_set(use_sliding_window=True), "use_sliding_window: expected false, got true"),
    "sliding layers": (
        _set(layer_types=["sliding_attention"] * 7),
        "layer_types: expected linear_attention or full_attention, got 'sliding_attention'",
    ),
    "yarn": (
        _set(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}),
        "rope_parameters: rope_type 'yarn': not supported",
    ),
    "no theta": (_set(rope_parameters=None), "rope_theta: expected a number above 1, got None"),
    "odd rotary part": (
        _set(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.3}),
        "partial_rotary_factor: expected an even part of 32 channels",
    ),
    "experts": (_set(num_experts_per_tok=6), "num_experts_per_tok: expected at most num_experts"),
    "shared expert": (
        _set(shared_expert_intermediate_size=24),
        "shared_expert.gate_proj.weight: expected shape [24, 48] by config.json, got [28, 48]",
    ),
    "classifier": (
        _set(architectures=["Qwen3NextForSequenceClassification"]),
        "expected a Qwen3-Next that generates text (Qwen3NextForCausalLM), got architecture",
    ),
    "Qwen4": (
        _set(model_type="qwen4_exp_text", architectures=["Qwen4ExpForCausalLM"]),
        "Qwen4-Exp, model_type 'qwen4_exp_text', architecture 'Qwen4ExpForCausalLM': not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(
    name: str, root: Path, tmp_path: Path
) -> None:
    change, expected = REFUSED[name]
    check_refused(root / "target", tmp_path / "spoilt", change, expected)


def test_projections_that_are_not_fused_are_refused(root: Path, tmp_path: Path) -> None:
    folder = changed(root / "target", tmp_path / "spoilt", lambda _: None)
    file = folder / "model.safetensors"
    renamed = {n.replace("in_proj_qkvz", "in_proj_qkv"): t for n, t in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"in_proj_qkvz\.weight.* missing") as caught:
        read_target(folder)
    assert "\n" not in str(caught.value)
