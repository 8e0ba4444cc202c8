"""A trained text-only pair through the whole program, and random Qwen3s against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tests.families.qwen3.test_reader import YARN, save_random
from tests.graph.test_target import PAGE_SIZE, TargetRows, open_target, rows_of
from tests.parity.conftest import ask_few_options
from tests.qwen3 import build_qwen3
from tests.reference.compare import FLOAT32_TOLERANCE
from tests.tiny import build_tiny
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.checkpoint.target import TargetCheckpoint
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.graph.target import target_graph
from trt_eagle3.parity import run
from trt_eagle3.parity.checks import sampling as sampling_check
from trt_eagle3.parity.metrics import relative_error
from trt_eagle3.parity.record import options as option_answers
from trt_eagle3.parity.reference.target import load_reference
from trt_eagle3.parity.report import plots
from trt_eagle3.serving.warm_up import warm_up

PROMPTS = ("What is 12 plus 30?", "Explain in two sentences why the sky is blue.")
ANSWER = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle) as engine:
        yield engine


def tokens(engine: LLM, prompt: str, **options: Any) -> tuple[int, ...]:
    return engine.generate(prompt, sampling=ANSWER, **options).token_ids


def test_bundle_of_a_text_target_has_no_vision_graph(bundle: Path) -> None:
    assert {p.name for p in bundle.iterdir() if (p / "model.onnx").exists()} == {
        "target",
        "fuse",
        "draft",
    }


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculative_equals_plain_equals_transformers(prompt: str, llm: LLM, bundle: Path) -> None:
    plain = tokens(llm, prompt, speculation=False)
    drafted = llm.generate(prompt, sampling=ANSWER)
    assert drafted.token_ids == plain
    model = Qwen3ForCausalLM.from_pretrained(bundle.parents[1] / "target", dtype=torch.float32)
    ids = llm.prepare(prompt).token_ids
    with torch.inference_mode():
        logits = model(torch.cat([ids, torch.tensor(plain)])[None]).logits[0]
    assert tuple(logits[len(ids) - 1 : -1].argmax(dim=-1).tolist()) == plain


def test_text_answers_and_acceptance_are_those_of_the_pair_it_was_made_of(
    llm: LLM, tmp_path: Path
) -> None:
    with LLM(build_tiny(tmp_path)) as tiny:
        for prompt in PROMPTS:
            ours, theirs = (engine.generate(prompt, sampling=ANSWER) for engine in (llm, tiny))
            assert ours.token_ids == theirs.token_ids
            assert ours.accepted_lengths == theirs.accepted_lengths
            assert max(ours.accepted_lengths) > 1


def test_torch_backend_gives_the_same_tokens(llm: LLM, bundle: Path, tmp_path: Path) -> None:
    pair = {name: bundle.parents[1] / name for name in ("target", "draft")}
    with LLM(build_tiny(tmp_path, **pair, engine={"backend": "torch"})) as other:
        assert tokens(other, PROMPTS[0]) == tokens(llm, PROMPTS[0])


def test_tensorrt_bundle_is_exported_without_levels(bundle: Path, tmp_path: Path) -> None:
    pair = {name: bundle.parents[1] / name for name in ("target", "draft")}
    engine = {"backend": "tensorrt", "device": "cuda", "dtype": "float16"}
    path = build_tiny(tmp_path, **pair, engine=engine)
    script = (path / "build_engine.sh").read_text()
    assert "target" in script
    assert "vision" not in script
    assert "deepstack" not in script


@pytest.mark.parametrize("kind", ["image", "video"])
def test_visuals_are_refused_in_one_line(kind: str, llm: LLM) -> None:
    with pytest.raises(UserError, match=f"reads text only, it takes no {kind}s") as caught:
        llm.generate("What is this?", **{f"{kind}s": ["absent.png"]})
    assert "\n" not in str(caught.value)


def test_content_in_parts_is_the_text_that_the_template_takes(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    processor = llm.bundle.processor
    found = processor.messages([{"role": "user", "content": parts}])
    expected = processor.messages([{"role": "user", "content": "one\ntwo"}])
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.rope_delta == 0
    assert found.position_ids[1].tolist() == list(range(len(found.token_ids)))


def test_inspect_names_the_family(bundle: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(bundle.parents[1] / "target")])
    assert result.exit_code == 0
    assert "Qwen3, 8 layers" in result.output
    assert "text only" in result.output


@pytest.mark.parametrize("command", ["validate", "probe", "bench"])
def test_commands_take_a_text_bundle(
    command: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "_DRAWS", 250)  # they have tests of their own
    monkeypatch.setattr(sampling_check, "_SETTINGS", {"top_k 5": SamplingParams(1.0, top_k=5)})
    monkeypatch.setattr(option_answers, "NUM_CASES", 1)
    ask_few_options(monkeypatch)
    monkeypatch.setattr(run, "MAX_TOKENS", {"quick": 12})
    monkeypatch.setattr(plots, "_svg", lambda _: "<svg></svg>")
    asked = (*PROMPTS, "What is 7 minus 5?") if command == "probe" else PROMPTS[:1]
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": prompt} for prompt in asked]))
    options = {
        "bench": ["--rounds", "1", "--batch", "2", "--max-tokens", "8"],
        "probe": ["--max-tokens", "64"],
        "validate": [],
    }[command]
    arguments = [command, str(bundle), "--prompts", str(prompts), *options, "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    if command == "validate":
        report = json.loads(result.stdout)
        status = {check["name"]: check["status"] for check in report["checks"]}
        assert status["vision.embeds"] == "not_applicable"
        assert status["processor.position_ids"] == "passed"
        assert status["target.logits_l2"] == "passed"


def test_warm_up_asks_no_image(bundle: Path) -> None:
    with LLM(bundle) as engine:
        assert warm_up(engine) > 0
        assert engine.generate(PROMPTS[0], sampling=ANSWER).token_ids


def test_deploy_writes_a_repository(bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    result = CliRunner().invoke(cli, ["deploy", str(bundle), "--repository", str(repository)])
    assert result.exit_code == 0, result.output
    assert (repository / "tiny" / "config.pbtxt").is_file()


GEOMETRIES: dict[str, dict[str, Any]] = {
    "own head": {},
    "tied head and biases": {"tie_word_embeddings": True, "attention_bias": True},
    "yarn": {
        "rope_parameters": YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 8},
    },
}


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_graph_and_reference_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = save_random(tmp_path, num_hidden_layers=3, **GEOMETRIES[name]).float()
    spec = read_target(tmp_path)
    ids = torch.randint(40, (17,), generator=torch.Generator().manual_seed(1))
    expected = model(ids[None]).logits[0]
    assert relative_error(reference_logits(spec, ids), expected) < FLOAT32_TOLERANCE
    found = graph_logits(spec, ids)
    assert relative_error(found, expected) < FLOAT32_TOLERANCE


def reference_logits(spec: TargetCheckpoint, ids: Tensor) -> Tensor:
    reference = load_reference(spec, torch.float32, "cpu")
    no_grids = torch.empty(0, 3, dtype=torch.int64), torch.empty(0)
    positions, delta = reference.rope_index(ids, *no_grids)
    assert delta == 0
    hidden, rope = reference.embed(ids), reference.rope(positions)
    for layer in reference.layers():
        hidden = layer(hidden, rope)
    return reference.head(reference.norm(hidden))


def graph_logits(spec: TargetCheckpoint, ids: Tensor) -> Tensor:
    runner = open_target(spec, ())
    rows = rows_of(spec, 0)
    positions = torch.arange(len(ids), dtype=torch.int32).repeat(3, 1)
    text = TargetRows(
        runner.embedding.lookup(ids), positions, rows.visual & False, rows.visual_levels
    )
    logits, _ = text.run(runner, [5])
    return logits


def test_graph_has_no_input_for_levels(tmp_path: Path) -> None:
    save_random(tmp_path)
    model = target_graph(read_target(tmp_path), (), False, "float32", PAGE_SIZE, lambda _: "x")
    assert "deepstack_embeds" not in {i.name for i in model.graph.input}
