"""BuildConfig: defaults, the example configs, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from trt_eagle3.config import (
    BuildConfig,
    EngineConfig,
    SpeculationConfig,
    config_from_dict,
    load_config,
)
from trt_eagle3.errors import UserError

ROOT = Path(__file__).parent.parent
SMALLEST = {"name": "a", "target": {"checkpoint": "x"}}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "build_configs").glob("*.yaml")), ids=lambda f: f.stem
)
def test_every_build_config_is_valid(file: Path) -> None:
    assert load_config(str(file)) == load_config(file)
    assert load_config(file).name


def test_load_config_of_a_mapping_names_what_takes_one() -> None:
    with pytest.raises(UserError, match=r"path of a YAML file, got dict\. .*model_validate"):
        load_config({})  # type: ignore[arg-type]


def test_smallest_config_has_defaults() -> None:
    config = config_from_dict(SMALLEST, "x")
    assert config == BuildConfig.model_validate(SMALLEST)
    assert config.engine.backend == "onnxruntime"
    assert config.draft is None


@pytest.mark.parametrize(
    ("engine", "batch", "kv_tokens"),
    [
        ({"backend": "torch", "device": "cuda"}, 64, None),
        ({"backend": "tensorrt"}, 16, None),
        ({"backend": "torch"}, 8, 2048),
        ({}, 8, 2048),
    ],
)
def test_backend_says_how_many_run_at_once_and_the_cpu_keeps_kv_for_two(
    engine: dict[str, object], batch: int, kv_tokens: int | None
) -> None:
    raw = SMALLEST | {"engine": engine, "limits": {"max_seq_len": 1024}}
    limits = config_from_dict(raw, "x").limits
    assert (limits.max_batch_size, limits.max_kv_tokens) == (batch, kv_tokens)
    without = config_from_dict(SMALLEST | {"engine": engine}, "x").limits
    assert (without.max_batch_size, without.max_kv_tokens) == (batch, kv_tokens and 8192)
    again = BuildConfig.model_validate(config_from_dict(raw, "x").model_dump())
    assert again.limits == limits


def test_limits_that_are_given_stay() -> None:
    raw = SMALLEST | {"limits": {"max_batch_size": 3}}
    assert config_from_dict(raw, "x").limits.max_kv_tokens is None
    raw = SMALLEST | {"limits": {"max_kv_tokens": 5000}}
    assert config_from_dict(raw, "x").limits.max_kv_tokens == 5000


def test_same_tree_is_one_whatever_else_is_configured() -> None:
    one = SpeculationConfig(steps=3)
    assert one.same_tree(SpeculationConfig(steps=3, adaptive=False, acceptance_floor=0.5))
    assert not one.same_tree(SpeculationConfig(steps=4))


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [
        ({"speculation": {"step": 3}}, "speculation.step", "speculation.steps"),
        ({"limits": {"max_seq_length": 9}}, "limits.max_seq_length", "limits.max_seq_len"),
        ({"targets": {}}, "targets", "target"),
        ({"engine": {"backends": "x"}}, "engine.backends", "engine.backend"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(
    change: dict[str, object], key: str, nearest: str
) -> None:
    with pytest.raises(UserError, match=rf"{key}: unknown key; nearest known key: {nearest}$"):
        config_from_dict(SMALLEST | change, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": {"backend": "cuda"}}, "engine.backend: .*got 'cuda'"),
        ({"limits": {"max_seq_len": 0}}, "limits.max_seq_len: .*got 0"),
        ({"limits": {"max_seq_len": 1 << 40}}, "limits.max_seq_len: .*got 1099511627776"),
        ({"limits": {"memory_fraction": 0}}, "limits.memory_fraction: .*got 0"),
        ({"limits": {"memory_fraction": 1.5}}, "limits.memory_fraction: .*got 1.5"),
        ({"limits": {"memory_fraction": "most"}}, "limits.memory_fraction: .*got 'most'"),
        ({"limits": [1]}, "limits: "),
        ({"speculation": {"adaptive": "perhaps"}}, "speculation.adaptive: .*got 'perhaps'"),
        ({"engine": {"page_size": 1 << 70}}, "engine.page_size: .*got"),
        ({"speculation": {"steps": 10**9}}, "speculation.steps: .*got 1000000000"),
        ({"engine": {"kv_dtype": "int8"}}, "engine.kv_dtype: .*got 'int8'"),
        ({"output": "a\0b"}, "output: expected a path without NUL characters"),
        ({"name": "../up"}, "name: expected letters, .*got '../up'"),
        ({"name": "a b"}, "name: expected letters, .*got 'a b'"),
        (
            {"speculation": {"num_draft_tokens": 4}},
            "a chain of 5 steps has num_draft_tokens 6, got 4",
        ),
        ({"speculation": {"tree": [[0]]}}, "tree paths need mode: tree"),
        ({"target": {}}, "target.checkpoint: required"),
    ],
)
def test_bad_value_names_key_and_value(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config_from_dict(SMALLEST | change, "x")
    assert "\n" not in str(caught.value)


def test_home_is_found_in_paths() -> None:
    tensorrt = {"plugin_library": "~/lib.so"}
    config = config_from_dict(
        SMALLEST | {"output": "~/engines", "engine": {"tensorrt": tensorrt}}, "x"
    )
    assert config.output == Path.home() / "engines"
    assert config.engine.tensorrt.plugin_library == Path.home() / "lib.so"


def test_chain_accepts_its_own_token_count() -> None:
    assert SpeculationConfig(steps=5, num_draft_tokens=6).num_draft_tokens == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected a mapping"),
        ("a: [", "not YAML"),
        ("[" * 2000, "not YAML"),
        (None, "cannot read"),
    ],
    ids=["list", "broken", "deep", "absent"],
)
def test_unreadable_config_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", ["[1]", "x", "3"])
def test_overrides_that_are_no_mapping_are_one_line(overrides: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: a\ntarget: {{checkpoint: x}}\ndraft: {{checkpoint: y, overrides: {overrides}}}"
    )
    with pytest.raises(UserError, match=r"draft\.overrides: expected a mapping of fields"):
        load_config(file, {"residual": "normed"})


def test_settings_come_over_the_keys_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: a\ntarget: {checkpoint: x}\nlimits: {max_seq_len: 64, max_waiting: 3}")
    found = load_config(file, settings={"limits": {"max_seq_len": 128}, "name": "b"})
    assert (found.name, found.limits.max_seq_len, found.limits.max_waiting) == ("b", 128, 3)
    with pytest.raises(UserError, match=r"limits\.max_sq_len: unknown key; nearest known key: "):
        load_config(file, settings={"limits": {"max_sq_len": 128}})


@pytest.mark.parametrize(("short", "long"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_short_names_of_types_are_taken(short: str, long: str) -> None:
    assert EngineConfig.model_validate({"backend": "torch", "dtype": short}).dtype == long
    engine = EngineConfig.model_validate({"backend": "tensorrt", "dtype": "fp16"})
    assert engine.residual == "float32"  # a default that follows from the type


def test_prompt_chunks_are_larger_where_a_gpu_is_to_be_filled() -> None:
    assert EngineConfig().prefill_chunk == 512
    assert EngineConfig.model_validate({"backend": "torch", "device": "cuda"}).prefill_chunk == 4096
    given = {"backend": "torch", "device": "cuda", "prefill_chunk": 64}
    assert EngineConfig.model_validate(given).prefill_chunk == 64
    assert EngineConfig.model_validate({"backend": "tensorrt"}).prefill_chunk == 512


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"dtype": "float16"}, "onnxruntime runs in float32 on the cpu, got float16 on cpu"),
        ({"device": "cuda"}, "onnxruntime runs in float32 on the cpu, got float32 on cuda"),
        ({"activations": "fp8"}, "fp8 is for backend: torch on device: cuda, got onnxruntime on"),
        ({"device": "cpu", "backend": "tensorrt"}, "tensorrt runs on device: cuda, got cpu"),
        (
            {"backend": "tensorrt", "dtype": "bfloat16", "residual": "float32"},
            "residual: float32 is for .*dtype: float16, got bfloat16 on tensorrt",
        ),
    ],
)
def test_what_a_backend_cannot_run_is_refused(engine: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate(engine)
