"""vLLM's names of options: the code's table is that of the docs, and names what exists here."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from tests.tiny import ROOT
from trt_eagle3 import LLM, SamplingParams, load
from trt_eagle3.cli import cli
from trt_eagle3.config import config_from_dict
from trt_eagle3.errors import UserError
from trt_eagle3.io.vllm_names import VLLM_NAMES, called_here, called_in_python

PAGE = (ROOT / "docs/vllm.md").read_text()


def test_table_of_the_docs_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `--([\w-]+)` \| (.+) \|$", PAGE, re.MULTILINE)
    found = {name.replace("-", "_"): ours.replace("`", "") for name, ours in rows}
    assert found == VLLM_NAMES


@pytest.mark.parametrize("ours", VLLM_NAMES.values())
def test_keys_and_options_exist(ours: str) -> None:
    for section, key in re.findall(r"\b(target|draft|engine|limits|speculation)\.(\w+)", ours):
        with pytest.raises(UserError) as caught:
            config_from_dict({section: {key: object()}}, "x")
        assert "unknown key" not in str(caught.value)
    options = {
        option for p in cli.commands["serve"].params for option in (*p.opts, *p.secondary_opts)
    }
    assert set(re.findall(r"serve (--[\w-]+)", ours)) <= options


def test_flag_becomes_set_and_a_key_of_another_section_is_found() -> None:
    assert called_here("--max-model-len") == (
        "here it is called --set limits.max_seq_len=VALUE, or limits.max_seq_len in a build config"
    )
    assert called_here("engine.max_model_len") == "here it is called limits.max_seq_len"
    assert called_here("max_pixls") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_model_len",
            "max_model_len: vLLM's name; here it is called "
            "settings={'limits': {'max_seq_len': VALUE}}",
        ),
        ("trust_remote_code", "no such option: code of a checkpoint is never run"),
        ("speculative_model", "here it is called draft"),
        ("drft", "drft: unknown argument. Did you mean draft? Arguments: bundle, draft, "),
    ],
)
def test_llm_and_load_answer_unknown_arguments_in_one_line(name: str, message: str) -> None:
    unknown: dict[str, Any] = {name: 3}
    for make in (LLM, load):
        with pytest.raises(UserError) as caught:
            make("anything", **unknown)
        assert message in str(caught.value)


def test_llm_names_its_first_argument_where_vllm_has_model() -> None:
    with pytest.raises(UserError, match="here it is called bundle, the first argument"):
        LLM(model="owner/name")  # type: ignore[call-arg]


def test_arguments_in_python_exist() -> None:
    parameters = inspect.signature(LLM).parameters
    assert next(iter(parameters)) == "bundle"
    for name in VLLM_NAMES:
        ours = called_in_python(name)
        assert ours is not None
        called = re.match(r"here it is called (\w+)", ours)
        if called and called[1] in ("draft", "settings", "prefix_cache", "tool_format"):
            assert called[1] in parameters


def test_sampling_params_answer_structured_outputs() -> None:
    with pytest.raises(UserError, match=r"^structured_outputs: .*; here it is called grammar"):
        SamplingParams(structured_outputs={})  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"In vLLM an argument of LLM; here it is called settings="):
        SamplingParams(max_model_len=3)  # type: ignore[call-arg]
