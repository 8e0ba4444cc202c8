"""The input of TensorRT-LLM's runtime: field names by version, a draft that reads back, and what
is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import TARGET, build_tiny
from trt_eagle3.checkpoint.draft import read_draft
from trt_eagle3.decode.llm import load
from trt_eagle3.errors import UserError
from trt_eagle3.runtimes.tensorrt_llm.bundle import deploy, llm_api_config
from trt_eagle3.runtimes.tensorrt_llm.schema import VERSIONS, resolve_version

# As each release's own page or source lists them; here by hand, so that a slip in schema.py shows.
NEWER = {"decoding_type": "Eagle3", "speculative_model": "draft"}
OLDER = {"decoding_type": "Eagle", "speculative_model_dir": "draft"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("engines"), limits={"max_batch_size": 4})


def options(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize(
    ("version", "names"), [("1.2", OLDER), ("1.2.1", OLDER), ("1.4", NEWER), ("1.4.0rc1", NEWER)]
)
def test_options_have_the_names_of_the_version(
    bundle: Path, tmp_path: Path, version: str, names: dict[str, str]
) -> None:
    found = deploy(bundle, tmp_path / "r", runtime_version=version)
    assert options(tmp_path / "r/llm_api.yaml") == {
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "max_batch_size": 4,
        "max_seq_len": 1024,
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.85},
        "speculative_config": {**names, "max_draft_len": 5, "eagle3_layers_to_capture": [1, 3, 4]},
    }
    assert version.startswith(found.version)


def test_draft_reads_back_as_it_was(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r")
    before, after = load(bundle).bundle.manifest, read_draft(tmp_path / "r/draft", None)
    assert before is not None
    for field in (
        "aux_layers",
        "feedback",
        "norm_before_fc",
        "positions",
        "rope",
        "draft_vocab_size",
        "head_dim",
    ):
        assert getattr(after, field) == getattr(before, field)


def test_serve_line_starts_the_runtime(bundle: Path, tmp_path: Path) -> None:
    program = tmp_path / "trtllm-serve"
    program.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    for version, option in (("1.2", "--extra_llm_api_options"), ("1.4", "--config")):
        deploy(bundle, tmp_path / "r", runtime_version=version)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            [tmp_path / "r/serve.sh", "--more"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )
        folder, target, *words = done.stdout.splitlines()
        assert (Path(folder) / "draft/config.json").is_file()
        assert Path(target) == TARGET
        assert words[:2] == [option, "llm_api.yaml"]
        assert words[2:] == ["--host", "127.0.0.1", "--port", "8000", "--more"]


def test_triton_model_has_the_whole_paths(bundle: Path, tmp_path: Path) -> None:
    deploy(bundle, tmp_path / "r", runtime_version="1.4", tensor_parallel_size=2)
    found = options(tmp_path / "r/triton/tensorrt_llm/1/model.yaml")
    assert found["model"] == str(TARGET)
    assert found["tensor_parallel_size"] == 2
    assert Path(found["speculative_config"]["speculative_model"], "model.safetensors").is_file()
    assert found["triton_config"] == {"max_batch_size": 0, "decoupled": True, "multimodal": True}


def test_dynamic_trees_where_they_work(tmp_path: Path) -> None:
    built = build_tiny(
        tmp_path, speculation={"mode": "dynamic", "steps": 4, "topk": 3, "num_draft_tokens": 11}
    )
    new, old = (
        deploy(built, tmp_path / "new", runtime_version="1.4"),
        deploy(built, tmp_path / "old", runtime_version="1.2"),
    )
    tree = options(tmp_path / "new/llm_api.yaml")["speculative_config"]
    assert (
        tree["use_dynamic_tree"],
        tree["dynamic_tree_max_topK"],
        tree["max_total_draft_tokens"],
    ) == (True, 3, 10)
    assert tree["max_draft_len"] <= tree["max_total_draft_tokens"] <= 3 * tree["max_draft_len"]
    assert "use_dynamic_tree" not in options(tmp_path / "old/llm_api.yaml")["speculative_config"]
    assert not any("mode" in note for note in new.notes)
    assert any("dynamic trees do not work in 1.2" in note for note in old.notes)


def test_what_the_runtime_decides_otherwise_is_said(bundle: Path, tmp_path: Path) -> None:
    found = deploy(bundle, tmp_path / "r")
    [note] = [note for note in found.notes if note.startswith("aux_pre_deepstack")]
    assert note in (tmp_path / "r/README.md").read_text()
    built = build_tiny(tmp_path / "other", draft=None)
    plain = deploy(built, tmp_path / "plain")
    assert plain.notes == ()
    assert "speculative_config" not in options(tmp_path / "plain/llm_api.yaml")
    assert not (tmp_path / "plain/draft").exists()


def test_field_that_a_version_lacks_is_refused() -> None:
    for version, field in (
        ("1.2", "speculative_model"),
        ("1.4", "speculative_model_dir"),
        ("1.4", "eagle_choices"),
    ):
        with pytest.raises(UserError, match=rf"{version} has no field speculative_config\.{field}"):
            VERSIONS[version].check({"speculative_config": {field: 1}})
    with pytest.raises(UserError, match="has no field max_batchsize"):
        VERSIONS["1.4"].check({"max_batchsize": 1})


def test_every_option_is_checked(bundle: Path) -> None:
    """Planted fault: a schema without a field that is written."""
    engine = load(bundle)
    config, release = engine.bundle.record.config, VERSIONS["1.4"]
    smaller = type(release)(
        **{**vars(release), "speculative": release.speculative - {"max_draft_len"}}
    )
    with pytest.raises(UserError, match="max_draft_len"):
        llm_api_config(
            config.limits, config.speculation, engine.bundle.manifest, smaller, 1, "draft"
        )


@pytest.mark.parametrize("version", ["1.3", "1.0", "2", "", "latest", "1.4x", "1.4.0rc"])
def test_unknown_version_is_refused(version: str) -> None:
    with pytest.raises(UserError, match=r"Known: 1\.2, 1\.4"):
        resolve_version(version)


def test_bad_places_and_sizes_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="overlaps"):
        deploy(bundle, bundle / "r")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError,
        match=r"expected a folder for TensorRT-LLM of trt-eagle3 or nothing there.*no files",
    ):
        deploy(bundle, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    checkpoint = Path(json.loads((bundle / "bundle.json").read_text())["sources"]["target"]["path"])
    with pytest.raises(UserError, match=f"lies in the checkpoint {checkpoint}"):
        deploy(bundle, checkpoint / "trtllm")
    for size in (0, 3, 1024):
        with pytest.raises(UserError, match="divisor"):
            deploy(bundle, tmp_path / "r", tensor_parallel_size=size)
    assert json.loads((bundle / "bundle.json").read_text())
