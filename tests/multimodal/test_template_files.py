"""Templates are taken from the place that transformers' processor and tokenizer take."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.chat_template import ChatTemplate
from trt_eagle3.multimodal.processor_files import copy_processor_files
from trt_eagle3.multimodal.template_files import TemplateSources, find_templates

EXTRA = "additional_chat_templates"
PLACES = (
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "tokenizer_config.json",
    f"{EXTRA}/default.jinja",
    f"{EXTRA}/tool_use.jinja",
    f"{EXTRA}/rag.jinja",
)
COMBINATIONS = [names for count in (1, 2, 3) for names in itertools.combinations(PLACES, count)]
FUNCTION = {"name": "wait", "description": "Waits.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
# Of transformers 4, whose files win over the processor's config.
OLD = int(transformers.__version__.partition(".")[0]) < 5


def checkpoint(folder: Path, places: tuple[str, ...]) -> Path:
    """A tokenizer, and in each place a template that is the place's name."""
    folder.mkdir()
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for place in places:
        config = {"chat_template": place}
        if place == "tokenizer_config.json":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(json.dumps(config) if place.endswith("json") else place)
    return folder


def of_tokenizer(folder: Path, *, tools: bool) -> str | None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    try:
        return str(tokenizer.get_chat_template(tools=TOOLS if tools else None))
    except ValueError:
        return None


def of_processor(folder: Path) -> str | None:
    """None where transformers refuses, or would take none: then the tokenizer's is taken."""
    try:
        values, _ = Qwen3VLProcessor.get_processor_dict(str(folder), local_files_only=True)
    except ValueError:
        return None
    found = values.get("chat_template")
    return found.get("default") if isinstance(found, dict) else found


def ours(folder: Path, *, processor: bool) -> TemplateSources | None:
    try:
        return find_templates(folder, processor=processor)
    except UserError:
        return None


@pytest.mark.parametrize("places", COMBINATIONS, ids="+".join)
def test_template_is_the_one_that_transformers_takes(
    places: tuple[str, ...], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "c", places)
    found = ours(folder, processor=False)
    expected = of_tokenizer(folder, tools=False)
    if expected is not None:
        assert found is not None
        assert found.default == expected
        assert (found.tool_use or found.default) == of_tokenizer(folder, tools=True)
    elif set(places) <= {"chat_template.json", "processor_config.json"}:
        assert found is not None  # from where a tokenizer does not look
    else:
        assert found is None

    if OLD and "processor_config.json" in places and len(places) > 1:
        return
    found, expected = ours(folder, processor=True), of_processor(folder)
    if expected is None and places == ("tokenizer_config.json",):
        expected = places[0]
    assert (found and found.default) == expected
    assert found is None or found.tool_use is None


def test_named_templates_of_the_tokenizer_config_are_taken_by_whether_there_are_tools(
    tmp_path: Path,
) -> None:
    named = [
        {"name": n, "template": n + "{{ tools | tojson if tools }}"}
        for n in ("default", "tool_use")
    ]
    folder = checkpoint(tmp_path / "c", ())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(folder, processor=False)
    assert template.render([]) == "default"
    assert template.render([], TOOLS).startswith("tool_use[{")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (PLACES[1:2] + PLACES[4:5], r"chat_template\.json beside additional_chat_templates/"),
        (PLACES[5:], "chat templates rag, tool_use, none called default. Save the default one as"),
        ((), r"no chat_template\.json or chat_template\.jinja"),
    ],
)
def test_combination_that_transformers_refuses_is_refused_with_the_fix(
    places: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        find_templates(checkpoint(tmp_path / "c", places), processor=True)


def test_copied_files_hold_the_same_templates(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c", PLACES[4:6])
    copy_processor_files(folder, tmp_path / "copy")
    copied = find_templates(tmp_path / "copy", processor=False)
    assert copied == TemplateSources(PLACES[4], PLACES[5])
