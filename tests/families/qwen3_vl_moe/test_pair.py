"""A pair whose target is the trained tiny one as a mixture of experts that computes the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.families.gates import failed, validate_pair
from tests.families.qwen3_vl_moe.prompts import PROMPTS, ask
from tests.moe import upcycled
from tests.qwen3 import save_qwen3, save_qwen3_draft
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3 import LLM
from trt_eagle3.checkpoint.convert import convert_draft
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.prompts.prompt_file import Question


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycled(tmp_path_factory.mktemp("moe") / "target", TARGET)


@pytest.fixture(scope="module")
def bundle(target: Path) -> Path:
    return build_tiny(target.parent / "engines", target=target)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(build_tiny(tmp_path_factory.mktemp("dense"))) as engine:
        yield engine


@pytest.mark.parametrize("producer", ["specforge", "speculators"])
def test_answers_and_acceptance_are_those_of_the_dense_pair(
    producer: str, target: Path, dense: LLM, tmp_path: Path
) -> None:
    """Speculative equals plain in float32; the draft accepts what it accepts of the dense one."""
    draft = DRAFT
    if producer != "specforge":
        draft = tmp_path / "draft"
        convert_draft(read_draft(DRAFT, read_target(target)), draft, producer)
    with LLM(build_tiny(tmp_path / "engines", target=target, draft=draft)) as engine:
        for prompt in PROMPTS:
            drafted, plain = ask(engine, prompt), ask(engine, prompt, speculation=False)
            assert drafted.token_ids == plain.token_ids
            expected = ask(dense, prompt)
            assert drafted.token_ids == expected.token_ids
            assert drafted.accepted_lengths == expected.accepted_lengths
            assert max(drafted.accepted_lengths) > 2


def test_torch_backend_gives_the_same_tokens(target: Path, dense: LLM, tmp_path: Path) -> None:
    with LLM(build_tiny(tmp_path, target=target, engine={"backend": "torch"})) as engine:
        for prompt in PROMPTS:
            assert ask(engine, prompt).token_ids == ask(dense, prompt).token_ids


def test_experts_quantised_by_the_build_pass_every_gate(target: Path, tmp_path: Path) -> None:
    path = build_tiny(tmp_path, target=target, engine={"weights": "int4"})
    found = validate_pair(path, [Question(PROMPTS[0].text)], made_from=read_target(target))
    assert failed(found) == []
    assert found.recorder["weights.made"].taken


@pytest.mark.usefixtures("wide_console")
def test_inspect_names_the_experts(target: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(target), str(DRAFT)])
    assert result.exit_code == 0
    assert "Qwen3-VL-MoE, 8 layers" in result.output
    assert "7 layers of 3 experts of 448, 2 per token, renormalised" in result.output


def test_text_only_mixture_answers_as_the_dense_one(dense: LLM, tmp_path: Path) -> None:
    pair = {
        "target": upcycled(tmp_path / "target", save_qwen3(tmp_path / "dense")),
        "draft": save_qwen3_draft(tmp_path / "draft"),
    }
    with LLM(build_tiny(tmp_path / "engines", **pair)) as engine:
        found, expected = (ask(e, PROMPTS[0]) for e in (engine, dense))
    assert found.token_ids == expected.token_ids
    assert found.accepted_lengths == expected.accepted_lengths


def test_aux_layer_beyond_the_mixtures_layers_is_refused(target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in DRAFT.iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 9]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="9") as caught:
        build_tiny(tmp_path / "engines", target=target, draft=draft)
    assert "\n" not in str(caught.value)
