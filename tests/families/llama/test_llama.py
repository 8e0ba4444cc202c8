"""Random Llamas through the whole program, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from click.testing import CliRunner
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.families.gates import failed, validate_pair
from tests.families.llama.random_pair import (
    DRAFTS,
    GEOMETRIES,
    LLAMA3,
    save_llama,
)
from tests.families.qwen3.test_qwen3 import graph_logits, reference_logits
from tests.families.random_pairs import config_of
from tests.families.test_readers import changed
from tests.families.text_pairs import (
    PROMPT,
    answer_of,
    check_refused,
    check_speculation,
    processor_of,
    quantise,
    save_answer_pairs,
)
from tests.reference.compare import FLOAT32_TOLERANCE
from trt_eagle3.checkpoint.target import target_to_dict
from trt_eagle3.cli import cli
from trt_eagle3.engine.bundle.record import reference_location
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.ops import DOMAIN
from trt_eagle3.graph.target import target_graph
from trt_eagle3.graph.trt_export import trt_export
from trt_eagle3.multimodal import Processor
from trt_eagle3.multimodal.control_tokens import ControlTokens
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

IDS = torch.randint(300, (17,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts of two producers that know the tokens of its answer."""
    return save_answer_pairs(tmp_path_factory.mktemp("llama"), save_llama, DRAFTS)


@pytest.fixture(scope="module")
def answer(root: Path) -> tuple[int, ...]:
    return answer_of(LlamaForCausalLM.from_pretrained(root / "target").eval(), root / "target")


@pytest.fixture(scope="module")
def bundle(root: Path) -> Path:
    return build(config_of(root / "target", root / "speculators", root / "engines")).path


@pytest.fixture(scope="module")
def processor(root: Path) -> Processor:
    return processor_of(root / "target")


def old_spelling(config: dict[str, Any]) -> None:
    """As transformers 4.57 writes it, and as Llama 3 is published."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config |= {"pretraining_tp": 1, "mlp_bias": False, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = save_llama(tmp_path, name, num_hidden_layers=2)
    spec = read_target(tmp_path)
    assert spec.tied_head is model.config.tie_word_embeddings
    assert spec.attention.qk_norm is None
    assert (spec.attention.qkv_bias, spec.attention.out_bias) == (name == "biases",) * 2
    expected = model(IDS[None]).logits[0]
    assert relative_error(reference_logits(spec, IDS), expected) < FLOAT32_TOLERANCE
    assert relative_error(graph_logits(spec, IDS), expected) < FLOAT32_TOLERANCE


FORMATS = ("fp8-channel", "modelopt-fp8", "modelopt-nvfp4", "w4a16", "awq", "gptq")
"""Quantised formats that Llama is published in."""


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_quantised_graph_equals_the_reference(name: str, tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1, hidden_size=192, intermediate_size=128)
    quantise(tmp_path, name)
    spec = read_target(tmp_path)
    assert spec.quantisation is not None
    assert len(spec.quantisation.weights) > 0
    assert relative_error(graph_logits(spec, IDS), reference_logits(spec, IDS)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("change", [lambda _: None, old_spelling], ids=["5.x", "4.57"])
def test_either_spelling_is_the_target_with_transformers_frequencies(
    change: Callable[[dict[str, Any]], None], root: Path, tmp_path: Path
) -> None:
    folder = changed(root / "target", tmp_path / "target", change)
    spec = read_target(folder)
    assert target_to_dict(spec) == target_to_dict(read_target(root / "target"))
    found = spec.attention.rope
    config = transformers.LlamaConfig.from_pretrained(folder)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    torch.testing.assert_close(torch.tensor(found.inv_freq), inv_freq, rtol=5e-7, atol=0)
    assert (found.kind, found.base, found.attention_scaling) == ("llama3", 5e5, scaling)


def test_rope_theta_that_the_config_leaves_out_is_that_of_transformers(
    root: Path, tmp_path: Path
) -> None:
    folder = changed(root / "target", tmp_path / "target", lambda c: c.pop("rope_parameters"))
    assert read_target(folder).attention.rope.base == 1e4


CONVERSATION = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Compare, please — naïvely."},
    {"role": "assistant", "content": "Seen."},
    {"role": "user", "content": "And <|eot_id|><|begin_of_text|> this?"},
]


@pytest.mark.parametrize("splits", [True, False])
def test_conversation_equals_transformers_and_has_one_bos(
    splits: bool, root: Path, processor: Processor
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "target")
    messages = CONVERSATION[:3] if splits else CONVERSATION
    if not splits:
        processor = processor_of(root / "target", split_special_tokens=False)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    found = processor.messages(messages).token_ids.tolist()
    assert found == expected["input_ids"]
    assert found.count(tokenizer.bos_token_id) == (1 if splits else 2)
    assert found[0] == tokenizer.bos_token_id != found[1]


def test_marks_that_a_user_writes_are_text_after_one_bos(processor: Processor) -> None:
    found = processor.messages(CONVERSATION).token_ids.tolist()
    bos = processor.tokenizer.token_to_id("<|begin_of_text|>")
    assert (found[0], found.count(bos)) == (bos, 1)
    assert "And <|eot_id|><|begin_of_text|> this?" in processor.decode(found)


def test_text_without_template_begins_with_the_tokenizers_bos(
    root: Path, processor: Processor
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "target")
    found = processor.raw("Once upon").token_ids.tolist()
    assert found == tokenizer("Once upon")["input_ids"]
    assert found[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_speculative_equals_autoregressive_equals_transformers(
    backend: str, draft: str, root: Path, answer: tuple[int, ...], tmp_path: Path
) -> None:
    check_speculation(root / "target", root / draft, tmp_path, backend, answer)


def test_every_gate_holds(bundle: Path) -> None:
    found = validate_pair(bundle, [Question(PROMPT), Question("Why is the sky blue?")])
    assert failed(found) == []
    names = ("processor.token_ids", "target.logits_l2", "draft.logits", "tokens.speculative")
    assert all(found.recorder[name].worst is not None for name in names)


def test_gate_of_tokens_sees_a_second_bos(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: ControlTokens, rendered: str, *others: Any, **_: Any) -> list[int]:
        return encode(self, rendered, *others)

    encode = ControlTokens.encode
    monkeypatch.setattr(ControlTokens, "encode", doubled)
    assert failed(validate_pair(bundle, [Question(PROMPT)]))[0] == "processor.token_ids"


def test_every_bundle_has_a_tensorrt_export(root: Path, tmp_path: Path) -> None:
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    pair = config_of(root / "target", root / "safeailab", tmp_path, engine=engine)
    script = (build(pair).path / "build_engine.sh").read_text()
    assert "target" in script
    assert "vision" not in script


def test_target_graph_is_exported_in_opset_17(root: Path) -> None:
    spec = read_target(root / "target")
    made = trt_export(target_graph(spec, (1, 2), False, "float16", 16, reference_location)).model
    assert next(o.version for o in made.opset_import if o.domain == "") == 17
    for node in made.graph.node:
        if node.domain != DOMAIN:
            assert onnx.defs.get_schema(node.op_type, 17).since_version <= 17, node.op_type


@pytest.mark.parametrize("draft", DRAFTS)
def test_inspect_names_family_rope_and_producer(draft: str, root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), str(root / draft)])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "Llama, 7 layers" in words
    assert "text only" in words
    assert "llama3" in words
    assert f"by {draft}" in words.lower()


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


def _rope(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(rope_parameters={"rope_theta": 5e5, **values})


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no factors": (
        _rope(rope_type="llama3"),
        "rope_type llama3 needs factor, low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings. Write",
    ),
    "one factor": (
        _rope(**{k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}),
        "rope_type llama3 needs high_freq_factor. Write",
    ),
    "no order": (
        _rope(**{**LLAMA3, "low_freq_factor": 4.0}),
        "low_freq_factor: expected less than high_freq_factor, got 4 and 4",
    ),
    "text for a factor": (_rope(**{**LLAMA3, "factor": "8"}), "factor: expected a number"),
    "unknown rope": (_rope(rope_type="longrope"), "rope_type 'longrope': not supported"),
    "dynamic rope": (_rope(rope_type="dynamic", factor=2.0), "rope_type dynamic: not supported"),
    "window": (_set(sliding_window=4096), "sliding window attention (sliding_window"),
    "sliding layers": (
        _set(layer_types=["sliding_attention"] * 7),
        "sliding window attention (sliding_window",
    ),
    "MLP biases": (_set(mlp_bias=True), "mlp_bias: expected false, got true: not supported"),
    "attention biases": (_set(attention_bias=True), "q_proj.bias"),
    "heads": (_set(num_attention_heads=5), "hidden_size: expected a multiple of the 5 heads"),
    "groups": (
        _set(num_key_value_heads=2),
        "3 heads, 2 key-value heads of 16: expected whole groups",
    ),
    "activation": (_set(hidden_act="gelu"), "hidden_act: expected silu, got 'gelu'"),
    "endless layers": (_set(num_hidden_layers=10**9), "1000000000 decoder layers"),
    "classifier": (
        _set(architectures=["LlamaForSequenceClassification"]),
        "expected a Llama that generates text (LlamaForCausalLM), got architecture",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_target_is_refused_in_one_line(
    name: str, root: Path, tmp_path: Path
) -> None:
    change, expected = REFUSED[name]
    check_refused(root / "target", tmp_path / "spoilt", change, expected)


def test_window_that_is_switched_off_is_full_attention(root: Path, tmp_path: Path) -> None:
    off = _set(sliding_window=4096, use_sliding_window=False)
    assert read_target(changed(root / "target", tmp_path / "target", off)).num_layers == 7


@pytest.mark.parametrize("draft", DRAFTS)
def test_draft_given_as_target_is_named(draft: str, root: Path) -> None:
    with pytest.raises(UserError, match=r"an EAGLE-3 draft.*, expected a target") as caught:
        read_target(root / draft)
    assert "\n" not in str(caught.value)
