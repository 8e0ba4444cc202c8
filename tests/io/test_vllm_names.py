"""vLLM's names of options: the code's table is that of the docs, and names what exists here."""

from __future__ import annotations

import re

import pytest

from tests.tiny import ROOT
from trt_eagle3.cli import cli
from trt_eagle3.config import config_from_dict
from trt_eagle3.errors import UserError
from trt_eagle3.io.vllm_names import VLLM_NAMES, called_here

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
