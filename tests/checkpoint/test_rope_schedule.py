"""Rope tables equal transformers' own, and contradictions between the two spellings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trt_eagle3.checkpoint.rope_schedule import make_rope, read_rope_config
from trt_eagle3.errors import UserError

FLOAT32_ROUNDINGS = 5e-7  # a power, a product and a blend, each rounded once

SCALED: dict[str, list[dict[str, Any]]] = {
    "linear": [{"factor": 4.0}],
    "llama3": [
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    ],
    "yarn": [
        {"factor": 4.0, "original_max_position_embeddings": 2048},
        {
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
        },
        {"factor": 4.0, "original_max_position_embeddings": 300, "mscale": 0.707},
        {"factor": 4.0, "original_max_position_embeddings": 1024, "mscale_all_dim": 0.5},
        {
            "factor": 1.0,
            "original_max_position_embeddings": 256,
            "mscale": 2.0,
            "mscale_all_dim": 1.0,
        },
        # the ramp begins below the first dimension
        {"factor": 4.0, "original_max_position_embeddings": 64},
        # and ends past the last one
        {"factor": 2.0, "original_max_position_embeddings": 2**31, "beta_fast": 1e5},
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 2},
        {
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.25,
            "truncate": False,
        },
    ],
    "dynamic": [{"factor": 4.0}],
}
CASES = [(kind, parameters) for kind, sets in SCALED.items() for parameters in sets]


@pytest.mark.parametrize(("kind", "parameters"), CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("base", [10000.0, 5e6])
def test_schedule_equals_transformers(
    kind: str, parameters: dict[str, Any], head_dim: int, base: float
) -> None:
    rope = {"rope_type": kind, "rope_theta": base, **parameters}
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=2048, rope_parameters=dict(rope)
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    made = make_rope(kind, base, head_dim, parameters=parameters, max_positions=2048)
    np.testing.assert_allclose(made.inv_freq, inv_freq.numpy(), rtol=FLOAT32_ROUNDINGS)
    assert made.attention_scaling == pytest.approx(scaling)
    assert (made.kind, made.base, made.layout) == (kind, base, "1d")


def test_schedules_differ_from_each_other() -> None:
    tables = [
        make_rope(kind, 1e4, 64, parameters=p, max_positions=2048).inv_freq
        for kind, p in CASES[:-1]
    ]
    assert len(set(tables)) == len(tables)


@given(head_dim=st.integers(1, 64).map(lambda n: 2 * n), base=st.floats(10, 1e7))
def test_default_is_the_plain_table(head_dim: int, base: float) -> None:
    expected = base ** (-np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(make_rope("default", base, head_dim).inv_freq, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("longrope", {}, "longrope.*not supported"),
        ("yarn", {"factor": 2.0}, "original_max_position_embeddings"),
        ("linear", {}, "needs factor"),
        ("linear", {"factor": 0}, "factor: expected a positive number"),
        ("linear", {"factor": "four"}, "factor: expected a number"),
        ("default", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            "llama3",
            {
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
            "low_freq_factor",
        ),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused(
    kind: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_rope(kind, 1e4, 64, parameters=parameters)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "head_dim"),
    [(1.0, 64), (0.5, 64), (1e30, 64), (float("nan"), 64), (1e4, 0), (1e4, -2), (1e4, 63)],
)
def test_base_or_head_dim_that_makes_no_table_is_refused(base: float, head_dim: int) -> None:
    with pytest.raises(UserError, match="expected a base above 1 and an even head_dim"):
        make_rope("default", base, head_dim)
    assert len(make_rope("default", 1.5, 2).inv_freq) == 1


def test_yarn_takes_a_missing_factor_from_the_context_length() -> None:
    parameters = {"original_max_position_embeddings": 512}
    assert (
        make_rope("yarn", 1e4, 64, parameters=parameters, max_positions=2048).parameters["factor"]
        == 4
    )


@pytest.mark.parametrize(
    ("config", "base", "kind", "where"),
    [
        ({}, None, "default", "no rope key"),
        ({"rope_theta": 5e6, "rope_scaling": None}, 5e6, "default", "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
            1e5,
            "linear",
            "rope_parameters, rope_parameters.rope_theta",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 1e5},
            1e5,
            "linear",
            "rope_scaling, rope_theta",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_theta": 100000,
            },
            1e5,
            "linear",
            "rope_parameters, rope_parameters.rope_theta",
        ),
    ],
)
def test_both_spellings_are_read(
    config: dict[str, Any], base: float | None, kind: str, where: str
) -> None:
    read = read_rope_config(config, Path("config.json"))
    assert (read.base, read.kind(), read.where) == (base, kind, where)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e6}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn"}},
            "rope_type",
        ),
        ({"rope_parameters": {"factor": 2.0}, "rope_scaling": {"factor": 4.0}}, "factor"),
        (
            {"rope_parameters": {"partial_rotary_factor": 1}, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
    ],
)
def test_spellings_that_contradict_each_other_are_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}: .* by .*, .* by ") as caught:
        read_rope_config(config, Path("config.json"), ", or say so")
    assert str(caught.value).endswith("or say so.")
