"""Random Qwen2s through the whole program, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from tests.families.gates import failed, validate_pair
from tests.families.qwen2.random_pair import DRAFTS, GEOMETRIES, save_qwen2
from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.families.random_pairs import config_of
from tests.families.test_readers import changed
from tests.families.text_pairs import (
    PROMPT,
    answer_of,
    check_conversation,
    check_refused,
    check_speculation,
    quantise,
    save_answer_pairs,
)
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

IDS = torch.randint(300, (17,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts of two producers that know the tokens of its answer."""
    return save_answer_pairs(tmp_path_factory.mktemp("qwen2"), save_qwen2, DRAFTS)


def published(config: dict[str, Any]) -> None:
    """Qwen2.5's config as on the Hub."""
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": "float32"}
    config |= {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 3}
    config.pop("layer_types")


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = save_qwen2(tmp_path, name, num_hidden_layers=2)
    spec = read_target(tmp_path)
    assert spec.tied_head is model.config.tie_word_embeddings
    attention = spec.attention
    assert (attention.qk_norm, attention.qkv_bias, attention.out_bias) == (None, True, False)
    expected = model(IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE


BIAS = "model.layers.0.mlp.down_proj.bias"


@torch.no_grad()
def test_gptq_with_zero_biases_equals_the_reference(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every projection; those without one get zeros."""
    save_qwen2(tmp_path, num_hidden_layers=1, hidden_size=192, intermediate_size=128)
    quantise(tmp_path, "gptq", **{BIAS: torch.zeros(192, dtype=torch.float16)})
    spec = read_target(tmp_path)
    assert "layers.0.mlp.down_proj.bias" not in spec.tensors
    assert "layers.0.self_attn.q_proj.bias" in spec.tensors
    assert relative_error(graph_logits(spec, IDS), reference_logits(spec, IDS)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("packed", [True, False])
def test_bias_that_the_config_has_no_place_for_is_refused(packed: bool, tmp_path: Path) -> None:
    save_qwen2(tmp_path, num_hidden_layers=1, hidden_size=192, intermediate_size=128)
    if packed:
        quantise(tmp_path, "gptq", **{BIAS: torch.full((192,), 0.5)})
    else:
        tensors = load_file(tmp_path / "model.safetensors") | {BIAS: torch.zeros(192)}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"down_proj\.bias surplus") as caught:
        read_target(tmp_path)
    assert "\n" not in str(caught.value)


def test_published_spelling_is_the_same_target(root: Path, tmp_path: Path) -> None:
    folder = changed(root / "target", tmp_path / "target", published)
    assert target_to_dict(read_target(folder)) == target_to_dict(read_target(root / "target"))


def test_conversation_equals_transformers(root: Path) -> None:
    check_conversation(root / "target")


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_speculative_equals_autoregressive_equals_transformers(
    backend: str, draft: str, root: Path, tmp_path: Path
) -> None:
    model = Qwen2ForCausalLM.from_pretrained(root / "target").eval()
    answer = answer_of(model, root / "target")
    check_speculation(root / "target", root / draft, tmp_path, backend, answer)


def test_every_gate_holds(root: Path, tmp_path: Path) -> None:
    bundle = build(config_of(root / "target", root / "specforge", tmp_path)).path
    found = validate_pair(bundle, [Question(PROMPT)])
    assert failed(found) == []
    names = ("processor.token_ids", "target.logits_l2", "draft.logits", "tokens.speculative")
    assert all(found.recorder[name].worst is not None for name in names)


def test_tensorrt_bundle_is_exported(root: Path, tmp_path: Path) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    pair = config_of(root / "target", root / "specforge", tmp_path, engine=engine)
    assert "target" in (build(pair).path / "build_engine.sh").read_text()


def test_inspect_names_family_and_producer(root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), str(root / "specforge")])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Qwen2, 7 layers" in words
    assert "by specforge" in words.lower()


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "window": (
        _set(use_sliding_window=True, max_window_layers=2, layer_types=None),
        "sliding window attention (use_sliding_window, layer_types): not supported",
    ),
    "unknown rope": (
        _set(rope_parameters={"rope_type": "longrope", "rope_theta": 1e6}),
        "rope_type 'longrope': not supported",
    ),
    "heads": (_set(num_attention_heads=5), "hidden_size: expected a multiple of the 5 heads"),
    "embeddings": (
        _set(architectures=["Qwen2Model"]),
        "expected a Qwen2 that generates text (Qwen2ForCausalLM), got architecture",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(
    name: str, root: Path, tmp_path: Path
) -> None:
    change, expected = REFUSED[name]
    check_refused(root / "target", tmp_path / "spoilt", change, expected)


def test_checkpoint_without_biases_is_refused(root: Path, tmp_path: Path) -> None:
    folder = changed(root / "target", tmp_path / "spoilt", lambda _: None)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith("q_proj.bias")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"q_proj\.bias.* missing") as caught:
        read_target(folder)
    assert "\n" not in str(caught.value)
