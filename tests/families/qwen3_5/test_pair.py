"""Random Qwen3.5 pairs, dense and mixtures of experts, through the whole program, against
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors import safe_open

from tests.families.gates import failed, validate_pair
from tests.families.qwen3_5.random_pair import save_hybrid, save_hybrid_draft
from tests.families.random_pairs import config_of
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

ANSWER = SamplingParams(max_tokens=12)
FRAMES = [draw_image(40 + step, (64, 96)) for step in range(3)]
ASKED = [
    Question("Why is the sky blue?"),
    Question("What is this?", [draw_image(1, (72, 100))]),
    Question("Both.", [draw_image(33, (33, 40))], [FRAMES]),
]
KINDS = {"dense": False, "moe": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of both kinds, with drafts of two producers."""
    folder = tmp_path_factory.mktemp("hybrid")
    for kind, moe in KINDS.items():
        model = save_hybrid(folder / kind / "target", moe=moe)
        for producer in ("specforge", "speculators"):
            save_hybrid_draft(folder / kind / producer, model, producer)
    return folder


def built(root: Path, kind: str, output: Path, draft: str = "specforge", **sections: Any) -> Path:
    pair = root / kind
    return build(config_of(pair / "target", pair / draft, output, **sections)).path


@pytest.mark.parametrize(
    ("kind", "backend"), [("moe", "onnxruntime"), ("moe", "torch"), ("dense", "torch")]
)
def test_every_gate_holds(kind: str, backend: str, root: Path, tmp_path: Path) -> None:
    engine = {"prefill_chunk": 64, "backend": backend}
    found = validate_pair(built(root, kind, tmp_path, engine=engine), ASKED)
    assert failed(found) == []


def test_every_gate_holds_quantised_by_the_build(root: Path, tmp_path: Path) -> None:
    """Weights of linear attention, of the shared expert and the others, and keys and values."""
    engine = {"prefill_chunk": 64, "backend": "torch", "weights": "fp8", "kv_dtype": "fp8"}
    bundle = built(root, "moe", tmp_path, engine=engine)
    with safe_open(bundle / "weights/target/quantised-fp8.safetensors", "pt") as file:
        of_type = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    made = {name for name, dtype in of_type.items() if dtype == "F8_E4M3"}
    for part in ("linear_attn.in_proj_qkv", "linear_attn.out_proj", "shared_expert.gate_proj"):
        assert any(part in name for name in made), part
    assert not any("in_proj_a" in name or "shared_expert_gate" in name for name in made)
    found = validate_pair(bundle, ASKED[1:2])
    assert failed(found) == []
    assert found.recorder["kv.rows"].taken


@pytest.mark.parametrize("draft", ["specforge", "speculators"])
def test_speculative_equals_autoregressive(draft: str, root: Path, tmp_path: Path) -> None:
    with LLM(built(root, "moe", tmp_path, draft)) as engine:
        for asked in ASKED:
            media = {"images": asked.images, "videos": asked.videos}
            plain = engine.generate(asked.prompt, sampling=ANSWER, speculation=False, **media)
            drafted = engine.generate(asked.prompt, sampling=ANSWER, **media)
            assert drafted.token_ids == plain.token_ids


def test_inspect_names_layers_experts_and_state(root: Path) -> None:
    pair = root / "moe"
    result = CliRunner().invoke(cli, ["inspect", str(pair / "target"), str(pair / "specforge")])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "Qwen3.5-MoE (3.6 and 3.8 too), 5 layers" in told
    assert "4 layers of linear attention, 1/3 heads of 12/20, convolution of 3" in told
    assert "5 layers of 5 experts of 20, 2 per token, renormalised, and a shared one of 28" in told
    assert "no visual levels" in told
    assert "recurrent states: 12,864 bytes per entry, two entries per sequence" in told
