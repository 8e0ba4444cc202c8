"""The input of vLLM: options that it has, a draft that reads back, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import TARGET, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.decode.llm import load
from trt_eagle3.drafts.registry import kind_of
from trt_eagle3.errors import UserError
from trt_eagle3.runtimes.vllm.bundle import deploy

# ``vllm serve --help=all`` of 0.25.1; by hand, so that a slip shows
OPTIONS = {
    "served-model-name",
    "dtype",
    "max-model-len",
    "max-num-seqs",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "data-parallel-size",
    "no-enable-prefix-caching",
    "speculative-config",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits={"max_batch_size": 4})


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_config_has_the_limits_and_the_draft_of_the_bundle(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r", tensor_parallel_size=2, data_parallel_size=3)
    assert read(tmp_path / "r/config.yaml") == {
        "served-model-name": "tiny",
        "dtype": "float32",
        "max-model-len": 1024,
        "max-num-seqs": 4,
        "gpu-memory-utilization": 0.9,
        "tensor-parallel-size": 2,
        "data-parallel-size": 3,
        "speculative-config": {"method": "eagle3", "model": "draft", "num_speculative_tokens": 5},
    }


def test_every_option_is_one_of_vllm(tmp_path: Path) -> None:
    built = build_tiny(tmp_path / "engines", limits={"prefix_cache": False})
    deploy(built, tmp_path / "r")
    found = read(tmp_path / "r/config.yaml")
    assert found["no-enable-prefix-caching"] is True
    assert set(found) <= OPTIONS


def test_draft_reads_back_as_it_was(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r")
    before, after = load(bundle).bundle.manifest, read_draft(tmp_path / "r/draft", None)
    assert before is not None
    for field in ("aux_layers", "feedback", "residual", "positions", "rope", "draft_vocab_size"):
        assert getattr(after, field) == getattr(before, field)


def test_block_draft_is_refused_without_a_passing_folder(tmp_path: Path) -> None:
    built = build_tiny(tmp_path / "engines", draft=TARGET.parent / "dflash")
    with pytest.raises(UserError, match=r"^a block draft: no layout here holds it\."):
        deploy(built, tmp_path / "r")


def test_aux_layers_are_states_as_vllm_counts_them(bundle: Path, tmp_path: Path) -> None:
    """vLLM captures before the layer of an id; the manifest counts outputs of layers."""
    deploy(bundle, tmp_path / "r")
    config = json.loads((tmp_path / "r/draft/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    verifier = config["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["Qwen3VLForConditionalGeneration"]


def test_serve_line_starts_vllm_beside_the_draft(bundle: Path, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    deploy(bundle, tmp_path / "r")
    done = subprocess.run(
        [tmp_path / "r/serve.sh", "--more"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    folder, command, target, *words = done.stdout.splitlines()
    assert (Path(folder) / "draft/config.json").is_file()
    assert (command, Path(target)) == ("serve", TARGET)
    assert words == ["--config", "config.yaml", "--host", "127.0.0.1", "--port", "8000", "--more"]


def test_containers_ask_for_all_gpus_and_mount_the_target(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r", tensor_parallel_size=2, data_parallel_size=2)
    service = read(tmp_path / "r/compose.yaml")["services"]["vllm"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 4
    assert service["command"][0] == "/target"
    assert {
        "type": "bind",
        "source": str(TARGET),
        "target": "/target",
        "read_only": True,
    } in service["volumes"]
    _, deployment, service = yaml.safe_load_all((tmp_path / "r/kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["args"][0] == "/models/target"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_bundle_without_a_draft_has_no_speculation(tmp_path: Path) -> None:
    built = build_tiny(tmp_path / "engines", draft=None)
    found = deploy(built, tmp_path / "r")
    assert found.notes == ()
    assert "speculative-config" not in read(tmp_path / "r/config.yaml")
    assert not (tmp_path / "r/draft").exists()
    assert "`draft/`" not in (tmp_path / "r/README.md").read_text()


def test_what_vllm_decides_otherwise_is_said(bundle: Path, tmp_path: Path) -> None:
    found = deploy(bundle, tmp_path / "r")
    readme = (tmp_path / "r/README.md").read_text()
    assert any(note.startswith("aux_pre_deepstack") for note in found.notes)
    assert all(note in readme for note in found.notes)
    built = build_tiny(tmp_path / "tree", speculation={"mode": "tree", "num_draft_tokens": 8})
    assert any("written as a chain" in note for note in deploy(built, tmp_path / "t").notes)


def test_each_difference_of_a_draft_is_named(bundle: Path) -> None:
    loaded = load(bundle).bundle
    assert loaded.manifest is not None
    other = replace(loaded.manifest, aux_pre_deepstack=False, image_rows="vision", position_shift=1)
    names = [note.split(":")[0] for note in kind_of(other).differences(other, loaded.spec)]
    assert names == ["image_rows", "position_shift"]


def test_bad_places_and_sizes_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="overlaps"):
        deploy(bundle, bundle / "r")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"expected a folder for vLLM of trt-eagle3"):
        deploy(bundle, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="divisor"):
        deploy(bundle, tmp_path / "r", tensor_parallel_size=3)
    with pytest.raises(UserError, match="--data-parallel-size 0"):
        deploy(bundle, tmp_path / "r", data_parallel_size=0)
