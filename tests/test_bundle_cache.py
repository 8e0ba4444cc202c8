"""A checkpoint in place of a bundle: built on the way, reused while nothing changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import trt_eagle3
from tests.tiny import DRAFT, TARGET, build_tiny
from trt_eagle3.bundle_cache import bundle_of, default_engine, is_checkpoint
from trt_eagle3.checkpoint import source
from trt_eagle3.cli import cli
from trt_eagle3.decode.llm import LLM
from trt_eagle3.engine import capi
from trt_eagle3.engine.bundle.read import read_bundle
from trt_eagle3.errors import EnvironmentMissingError, UserError
from trt_eagle3.serving import server

CPU = {"engine": {"backend": "onnxruntime"}}
QUESTION = "What is 12 plus 30?"


def made(
    target: Path, cache: Path, draft: Path | None = DRAFT, **settings: Any
) -> tuple[Path, str]:
    """The bundle of ``target``, and what was done: ``built`` or ``reused``."""
    lines: list[str] = []
    path = bundle_of(target, draft, {**CPU, **settings}, cache=cache, announce=lines.append)
    return path, lines[-1].split()[0]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TARGET, tmp_path / "my target"))


def test_checkpoint_is_built_once_and_reused(target: Path, tmp_path: Path) -> None:
    first, what = made(target, tmp_path / "cache")
    assert what == "built"
    assert first.name == "my-target"
    assert made(target, tmp_path / "cache") == (first, "reused")


def test_changed_weights_config_or_settings_are_built_anew(target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths = [made(target, cache)[0]]
    file = next(target.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    paths.append(made(target, cache)[0])
    paths.append(made(target, cache, limits={"max_batch_size": 2})[0])
    paths.append(made(target, cache, draft=None)[0])
    assert len(set(paths)) == 4
    assert made(target, cache)[1] == "reused"


def test_new_version_of_the_tool_builds_anew(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = made(target, tmp_path)
    monkeypatch.setattr("trt_eagle3.bundle_cache.version", lambda _: "99")
    assert made(target, tmp_path)[0] != first


def test_damaged_bundle_in_the_cache_is_built_again(target: Path, tmp_path: Path) -> None:
    path, _ = made(target, tmp_path)
    (path / "bundle.json").write_text("{}")
    with pytest.raises(UserError, match="not one of trt-eagle3"):
        made(target, tmp_path)
    (path / "bundle.json").unlink()
    shutil.rmtree(path)
    assert made(target, tmp_path) == (path, "built")


def test_weights_stay_in_the_checkpoint_unless_the_build_makes_new_ones(
    target: Path, tmp_path: Path
) -> None:
    path, _ = made(target, tmp_path)
    assert read_bundle(path).weights == "reference"


def test_length_is_within_the_positions_of_the_target(tmp_path: Path) -> None:
    record = read_bundle(made(TARGET, tmp_path)[0])
    assert record.config.limits.max_seq_len == min(4096, record.target["max_position_embeddings"])


def test_cache_folder_is_that_of_the_environment(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_EAGLE3_CACHE", str(tmp_path / "mine"))
    path = bundle_of(target, None, CPU)
    assert path.is_relative_to(tmp_path / "mine" / "bundles")


def test_cache_that_cannot_be_written_is_named(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the cache.*--cache FOLDER"):
        made(target, tmp_path / "file")


def test_bundle_is_used_as_it_is_and_takes_neither_draft_nor_build_keys(tmp_path: Path) -> None:
    bundle = build_tiny(tmp_path)
    assert bundle_of(bundle) == bundle
    with pytest.raises(UserError, match=r"draft mtp: set at build, but .* is a bundle"):
        bundle_of(bundle, "mtp")
    with pytest.raises(UserError, match=r"^settings engine\.backend: set at build"):
        bundle_of(bundle, None, CPU)


def test_wrong_settings_and_a_missing_draft_are_named_as_they_were_given(
    target: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^settings: max_seq_len: unknown key; .*limits\."):
        LLM(target, settings={"max_seq_len": 3}, cache=tmp_path)
    with pytest.raises(UserError, match=r"^--set: max_seq_len: unknown key"):
        CliRunner().invoke(
            cli,
            ["generate", str(target), "hi", "--set", "max_seq_len=3"],
            catch_exceptions=False,
            standalone_mode=False,
        )
    with pytest.raises(UserError, match=r"^draft: /no/where: no such folder"):
        made(target, tmp_path, Path("/no/where"))


def test_hub_id_is_no_path_below_an_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_checkpoint("owner/name")
    (tmp_path / "owner").mkdir()
    assert not is_checkpoint("owner/name")
    assert not is_checkpoint("owner")


def test_hub_id_is_built_from_its_snapshot(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(target))
    path = bundle_of("owner/name-VL", None, CPU, cache=tmp_path / "cache")
    assert path.name == "name-VL"
    assert read_bundle(path).sources["target"].checkpoint == "owner/name-VL"
    assert source.is_hub_id("owner/name-VL")


def test_engine_without_settings_is_torch_in_bfloat16_on_a_gpu_and_onnxruntime_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert default_engine() == {"backend": "onnxruntime"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(capi, "available", lambda: True)
    assert default_engine() == {"backend": "torch", "device": "cuda", "dtype": "bfloat16"}
    monkeypatch.setattr(capi, "available", lambda: False)
    with pytest.raises(EnvironmentMissingError) as caught:
        default_engine()
    assert "Run once: trt-eagle3 install-kernels" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_backend_of_the_settings_needs_no_gpu(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> None:
        raise AssertionError

    monkeypatch.setattr("trt_eagle3.bundle_cache.default_engine", asked)
    config = read_bundle(bundle_of(target, None, {"engine": {"device": "cpu"}}, cache=tmp_path))
    assert config.engine.backend == "onnxruntime"


def test_llm_and_load_take_a_checkpoint_and_its_draft(target: Path, tmp_path: Path) -> None:
    with LLM(target, draft=DRAFT, settings=CPU, cache=tmp_path) as llm:
        text = llm.generate(QUESTION, max_tokens=8).text
    with trt_eagle3.load(target, draft=DRAFT, settings=CPU, cache=tmp_path) as llm:
        assert llm.bundle.manifest is not None
        assert llm.generate(QUESTION, max_tokens=8).text == text


def test_generate_builds_a_checkpoint_and_says_so_on_stderr(tmp_path: Path) -> None:
    words = ["generate", str(TARGET), QUESTION, "--draft", str(DRAFT), "--cache", str(tmp_path)]
    words += ["--set", "engine.backend=onnxruntime"]
    first = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert first.stdout == "12 plus 30 equals 42.\n"
    assert CliRunner().invoke(cli, words, catch_exceptions=False).stdout == first.stdout
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [
        p.stem for p in tmp_path.glob("*.lock")
    ]


def test_serve_builds_a_checkpoint_and_splits_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(server, "serve", lambda bundle, **options: seen.update(options, at=bundle))
    words = ["--set", "max_media=2", "--set", "limits.max_batch_size=3", "--cache", str(tmp_path)]
    words += ["--set", "engine.backend=onnxruntime", "--draft", str(DRAFT)]
    CliRunner().invoke(
        cli, ["serve", str(TARGET), *words], catch_exceptions=False, standalone_mode=False
    )
    assert seen["serving"].max_media == 2
    record = read_bundle(seen["at"])
    assert record.config.limits.max_batch_size == 3
    assert record.draft is not None
