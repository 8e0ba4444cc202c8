"""Random Qwen3.5s with an MTP head through the whole program: every gate, every mode, and what is
easily wrong, each caught by its gate.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tests.drafts.mtp.head import add_head
from tests.families.gates import failed, validate_pair
from tests.families.qwen3_5.random_pair import save_hybrid
from tests.families.random_pairs import config_of
from tests.parity.planting import Planted, plant_in
from trt_eagle3 import LLM, SamplingParams
from trt_eagle3.cli import cli
from trt_eagle3.decode.speculation import eagle
from trt_eagle3.drafts.registry import find_draft
from trt_eagle3.errors import UserError
from trt_eagle3.families.registry import read_target
from trt_eagle3.parity.record.workload import draw_image
from trt_eagle3.pipeline import build
from trt_eagle3.prompts.prompt_file import Question
from trt_eagle3.runtimes.tensorrt_llm.bundle import deploy as deploy_tensorrt_llm
from trt_eagle3.runtimes.vllm.bundle import deploy as deploy_vllm

FRAMES = [draw_image(40 + step, (64, 96)) for step in range(3)]
ASKED = [
    Question("Why is the sky blue?"),
    Question("Both.", [draw_image(33, (33, 40))], [FRAMES]),
]
MODES: dict[str, dict[str, Any]] = {
    "chain": {"mode": "chain", "steps": 3},
    "tree": {"mode": "tree", "steps": 3, "topk": 3, "num_draft_tokens": 8},
    "dynamic": {"mode": "dynamic", "steps": 3, "topk": 2, "num_draft_tokens": 7},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    for kind, moe in {"dense": False, "moe": True}.items():
        save_hybrid(folder / kind, moe=moe)
        add_head(folder / kind)
    return folder


def built(target: Path, output: Path, mode: str = "tree", **sections: Any) -> Path:
    sections = {"speculation": {**MODES[mode], "adaptive": False}, **sections}
    return build(config_of(target, Path("mtp"), output, **sections)).path


@pytest.fixture(scope="module")
def bundle(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(root / "dense", tmp_path_factory.mktemp("bundle"))


@pytest.mark.parametrize(("kind", "backend"), [("dense", "onnxruntime"), ("moe", "torch")])
def test_every_gate_holds(kind: str, backend: str, root: Path, tmp_path: Path) -> None:
    found = validate_pair(built(root / kind, tmp_path, engine={"backend": backend}), ASKED)
    assert failed(found) == []
    names = {m.tensor for m in found.recorder["draft.aux"].taken}
    assert names == {"aux_hidden_states[norm]"}
    for check in ("draft.fuse", "draft.features", "draft.logits", "draft.proposals"):
        assert found.recorder[check].taken, check


@pytest.mark.parametrize("mode", MODES)
def test_speculative_equals_autoregressive(mode: str, root: Path, tmp_path: Path) -> None:
    kind = "moe" if mode == "dynamic" else "dense"
    with LLM(built(root / kind, tmp_path, mode)) as engine:
        for asked in ASKED:
            for sampling in (SamplingParams(max_tokens=12), SamplingParams(0.8, max_tokens=8)):
                media = {"images": asked.images, "videos": asked.videos}
                drafted = engine.generate(asked.prompt, sampling=sampling, **media)
                assert drafted.acceptance_length is not None
                if sampling.temperature == 0:
                    plain = engine.generate(
                        asked.prompt, sampling=sampling, speculation=False, **media
                    )
                    assert drafted.token_ids == plain.token_ids


def _draft(**changes: Any) -> Callable[[Planted, Any], None]:
    def plant(p: Planted, manifest: Any) -> None:
        wrong = dataclasses.replace(manifest, **changes)
        for graph in ("target", "fuse", "draft"):
            p.rebuild(graph, draft=wrong)

    return plant


def _late(p: Planted, _: Any) -> None:
    right = eagle.draft_positions
    p.patch.setattr(eagle, "draft_positions", lambda *args: right(*args) + 1)


def _without_vision(p: Planted, _: Any) -> None:
    p.patch.setattr(eagle, "put_draft_visual", lambda *_: None)


FAULTS: dict[str, tuple[Callable[[Planted, Any], None], str, str]] = {
    "halves of fc exchanged": (
        _draft(concat="hidden_first"),
        "draft.features",
        "embedding_and_hidden",
    ),
    "norm without the one": (_draft(norm_offset=0.0), "draft.fuse", "features"),
    "hidden state before the norm": (
        _draft(hidden="raw"),
        "target.aux",
        "aux_hidden_states[norm]",
    ),
    "fed back before the norm": (_draft(feedback="pre_norm"), "draft.features", "features_out"),
    "vision rows missing": (_without_vision, "draft.inputs_embeds", "inputs_embeds"),
    "position off by one": (_late, "draft.position_ids", "position_ids"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught_by_its_gate(
    fault: str, bundle: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check, tensor = FAULTS[fault]
    planted = plant_in(bundle, tmp_path, monkeypatch)
    planted.spec = read_target(root / "dense")
    plant(planted, find_draft("mtp", planted.spec, {}))
    found = validate_pair(planted.bundle, ASKED[1:])
    assert found.diagnosis is not None
    assert (found.diagnosis.check, found.diagnosis.tensor) == (check, tensor)


def test_head_in_a_file_of_its_own_moves_into_the_bundle(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in (root / "dense").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    index = {}
    for name, own in (("model-1.safetensors", False), ("model-2.safetensors", True)):
        some = {n: t for n, t in tensors.items() if n.startswith("mtp.") == own}
        save_file(some, target / name, {"format": "pt"})
        index |= dict.fromkeys(some, name)
    file = target / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    made = built(target, tmp_path / "out", "chain")
    assert (made / "weights/draft/model-2.safetensors").is_file()
    with LLM(made) as engine:
        drafted = engine.generate("Why?", sampling=SamplingParams(max_tokens=6))
        plain = engine.generate("Why?", sampling=SamplingParams(max_tokens=6), speculation=False)
        assert drafted.token_ids == plain.token_ids
    found = validate_pair(made, ASKED[:1])
    assert failed(found) == []


def test_inspect_shows_the_head_and_where_each_field_is_from(root: Path) -> None:
    result = CliRunner().invoke(cli, ["inspect", str(root / "dense"), "mtp"])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "MTP head by qwen3_5, 1 layer, hidden 48, 3/1 heads of 32" in told
    assert "hidden normed convention: as servers of Qwen3.5 do; probe measures it" in told
    bare = CliRunner().invoke(cli, ["inspect", str(root / "dense")])
    assert "has an MTP head: to draft with it, draft.checkpoint: mtp" in " ".join(
        bare.output.split()
    )


def test_vllm_is_told_to_use_the_targets_own_head(bundle: Path, tmp_path: Path) -> None:
    found = deploy_vllm(bundle, tmp_path / "r")
    options = yaml.safe_load((tmp_path / "r/config.yaml").read_text())
    assert options["speculative-config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert not (tmp_path / "r/draft").exists()
    assert [note.split(":")[0] for note in found.notes] == ["speculation.mode"]


def test_tensorrt_llm_is_refused_in_one_line(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not support this target's MTP head") as caught:
        deploy_tensorrt_llm(bundle, tmp_path / "r")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_bundle_reopens_with_the_manifest_it_was_built_with(root: Path, tmp_path: Path) -> None:
    config = config_of(root / "dense", Path("mtp"), tmp_path)
    overrides = {"position_shift": 1, "hidden": "raw"}
    draft = config.draft.model_copy(update={"overrides": overrides})  # type: ignore[union-attr]
    made = build(config.model_copy(update={"draft": draft})).path
    with LLM(made) as engine:
        manifest: Any = engine.bundle.manifest
        assert (manifest.kind, manifest.hidden, manifest.position_shift) == ("mtp", "raw", 1)
        assert not manifest.takes_normed
        assert torch.is_tensor(engine.bundle.draft_embedding.lookup(torch.tensor([1])))
