"""A random Qwen3-Omni's thinker through the whole program, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests.families.gates import failed, validate_pair
from tests.families.qwen3_omni_moe.random_pair import save_omni, save_omni_draft
from tests.families.random_pairs import config_of
from tests.quantised import fp8_block
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.errors import UserError
from trt_eagle3.families.qwen3_omni_moe import prompt
from trt_eagle3.families.registry import read_target
from trt_eagle3.multimodal import Video
from trt_eagle3.parity.record.workload import _frames, draw_image
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question

ANSWER = SamplingParams(max_tokens=12)
VIDEO = Video(_frames(8, (24, 24)), fps=2.0)
ASKED = [
    Question("What is this?", [draw_image(1, (72, 100))]),
    Question("What moves, and where?", [draw_image(2, (40, 64))], videos=[VIDEO]),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and drafts of two producers."""
    folder = tmp_path_factory.mktemp("omni")
    model = save_omni(folder / "target")
    for producer in ("specforge", "speculators"):
        save_omni_draft(folder / producer, model, producer)
    return folder


def built(root: Path, output: Path, draft: str = "specforge", **engine: Any) -> Path:
    sections = {"engine": {"prefill_chunk": 64, **engine}}
    return build(config_of(root / "target", root / draft, output, **sections)).path


@pytest.mark.parametrize(
    ("backend", "draft"), [("onnxruntime", "speculators"), ("torch", "specforge")]
)
def test_speculative_equals_autoregressive(
    backend: str, draft: str, root: Path, tmp_path: Path
) -> None:
    with LLM(built(root, tmp_path, draft, backend=backend)) as engine:
        for q in ASKED:
            media = {"images": q.images, "videos": q.videos}
            plain = engine.generate(q.prompt, sampling=ANSWER, speculation=False, **media)
            drafted = engine.generate(q.prompt, sampling=ANSWER, **media)
            assert drafted.token_ids == plain.token_ids


def test_every_gate_holds(root: Path, tmp_path: Path) -> None:
    """Processing, positions, tower, every layer, aux, drafts and tokens are transformers'."""
    assert failed(validate_pair(built(root, tmp_path), ASKED)) == []


def test_planted_fault_in_the_time_of_videos_is_caught(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patches half as far apart as their seconds say."""
    right = prompt.rope_index

    def wrong(rows: Any, grids: Any, steps: Any, merge: int) -> Any:
        return right(rows, grids, steps // 2, merge)

    monkeypatch.setattr(prompt, "rope_index", wrong)
    assert "processor.position_ids" in failed(validate_pair(built(root, tmp_path), ASKED[1:]))


@pytest.mark.usefixtures("wide_console")
def test_inspect_names_the_thinker(root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "target"), str(root / "specforge")])
    assert result.exit_code == 0, result.output
    assert "Qwen3-Omni thinker, 5 layers" in result.output
    assert "4 layers of 5 experts of 20, 2 per token, renormalised" in result.output


def test_audio_and_the_talker_are_left_out(root: Path) -> None:
    spec = read_target(root / "target")
    assert not any("audio" in ref.name for ref in spec.tensors.values())
    assert spec.require_vision().own == {"position_id_per_seconds": 13}


def test_parts_left_out_may_be_quantised_in_any_way(root: Path, tmp_path: Path) -> None:
    """The talker's weights and scales are neither read nor checked."""
    for file in (root / "target").iterdir():
        shutil.copy(file, tmp_path)
    file = tmp_path / "model.safetensors"
    odd = {
        "talker.model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4, dtype=torch.uint8),
        "talker.model.layers.0.self_attn.k_proj.k_scale": torch.zeros(()),
    }
    tensors = load_file(file)
    name = "thinker.model.layers.0.self_attn.q_proj"
    packed = fp8_block(tensors.pop(f"{name}.weight"))
    tensors |= {f"{name}.{part}": t for part, t in packed.items()} | odd
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    claim = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))
    spec = read_target(tmp_path)
    assert spec.tensors.keys() == read_target(root / "target").tensors.keys()
    assert dict(spec.kv_scales) == {}
    assert spec.quantisation is not None
    assert list(spec.quantisation.weights.values()) == [1]


def test_thinker_that_names_no_end_of_vision_builds_and_answers_alike(
    root: Path, tmp_path: Path
) -> None:
    """transformers' config class has no such key."""
    for file in (root / "target").iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((root / "target" / "config.json").read_text())
    assert config["thinker_config"].pop("vision_end_token_id")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_target(tmp_path).require_vision().vision_end_token_id is None
    made = build(config_of(tmp_path, root / "specforge", tmp_path.parent / "out")).path
    with LLM(made) as engine, LLM(built(root, tmp_path.parent / "named")) as named:
        for q in ASKED:
            media = {"images": q.images, "videos": q.videos}
            found, expected = (
                e.generate(q.prompt, sampling=ANSWER, **media) for e in (engine, named)
            )
            assert found.token_ids == expected.token_ids
        control = engine.bundle.processor.rules.control_tokens
        assert control == named.bundle.processor.rules.control_tokens


@pytest.mark.parametrize("kind", ["audio", "input_audio", "audio_url"])
def test_audio_is_refused_by_name_in_one_line(kind: str, root: Path, tmp_path: Path) -> None:
    part = {"type": kind, kind: "speech.wav"}
    with (
        LLM(built(root, tmp_path)) as engine,
        pytest.raises(UserError, match="unknown part audio: ") as e,
    ):
        engine.bundle.processor.messages([{"role": "user", "content": [part]}])
    assert "\n" not in str(e.value)


def test_video_between_whole_positions_is_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    video = Video(_frames(8, (24, 24)), fps=7.0)
    with LLM(built(root, tmp_path)) as engine, pytest.raises(UserError, match=r"3\.71 rope") as e:
        engine.prepare("What moves?", videos=[video])
    assert "\n" not in str(e.value)


def test_checkpoint_without_a_thinker_is_refused(root: Path, tmp_path: Path) -> None:
    config = json.loads((root / "target" / "config.json").read_text())
    del config["thinker_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="thinker_config: expected an object"):
        read_target(tmp_path)


@torch.no_grad()
def test_positions_are_those_of_transformers_for_any_order(root: Path) -> None:
    from trt_eagle3.families.qwen3_omni_moe.rope_index import rope_index
    from trt_eagle3.parity.reference.target import load_reference

    spec = read_target(root / "target")
    vision = spec.require_vision()
    reference = load_reference(spec, torch.float32, "cpu")
    image, video = vision.image_token_id, vision.video_token_id
    start, end = vision.vision_start_token_id, vision.vision_end_token_id
    ids = [1, start, *[image] * 6, end, 2, start, *[video] * 12, end, 3, 4]
    grids = torch.tensor([[1, 4, 6], [3, 4, 4]])
    token_ids = torch.tensor(ids)
    visual = (token_ids == image) | (token_ids == video)
    found, delta = rope_index(visual, grids, torch.tensor([0, 26]), 2)
    expected, theirs = reference.rope_index(token_ids, grids, torch.tensor([0.0, 2.0]))
    assert torch.equal(found, expected.int())
    assert delta == theirs
    assert delta > 0, "a video takes more positions than tokens"
