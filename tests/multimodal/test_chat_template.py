"""Rendering equals transformers', and each place of a template is found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.multimodal.record_goldens import CHAT_TEMPLATE
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal.chat_template import ChatTemplate

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What? <b>&"}, {"type": "video"}]},
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
]
MARKED = (
    "{% for message in messages %}{% generation %}{{ message.role }}{% endgeneration %}"
    "{{ message.content | tojson }}{{ eos_token }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, MARKED], ids=["qwen", "marked"])
def test_prompt_equals_hf(source: str) -> None:
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=source, add_generation_prompt=True, eos_token="<|im_end|>"
    )
    assert ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(CONVERSATION) == expected[0]


def test_missing_turn_would_be_noticed() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    assert template.render(CONVERSATION) != template.render(CONVERSATION[1:])


KNOWS_FEW_ROLES = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}{% for message in messages %}"
    "{% if message.role in ('user', 'assistant') %}({% if message.content is string %}{{ message.content | trim }}"
    "{% else %}{{ message.content[-1].text }}{% endif %}){% endif %}{% endfor %}"
)
USER, SYSTEM = {"role": "user", "content": " hi "}, {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("messages", "left_out"),
    [
        ([USER, SYSTEM], "message 2 (role 'system')"),
        ([SYSTEM, SYSTEM, USER], "message 2 (role 'system')"),
        ([{"role": "developer", "content": "Be brief."}, USER], "message 1 (role 'developer')"),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}], "message 1 (role 'user')"),
    ],
)
def test_message_that_the_template_would_drop_is_refused(messages: list[Any], left_out: str) -> None:
    with pytest.raises(UserError, match=re.escape(left_out)):
        ChatTemplate(KNOWS_FEW_ROLES, {}).render(messages)


def test_messages_that_say_nothing_may_be_dropped() -> None:
    template = ChatTemplate(KNOWS_FEW_ROLES, {})
    assert template.render([SYSTEM, USER, {"role": "system", "content": " "}]) == "[Be brief.](hi)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.json", json.dumps({"chat_template": "found"})),
        ("chat_template.jinja", "found"),
        ("processor_config.json", json.dumps({"chat_template": "found"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "found"})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": "found"}]})),
    ],
)
def test_template_is_found_in(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert ChatTemplate.from_directory(tmp_path).render([]) == "found"


def test_special_tokens_come_from_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "E"}, "pad_token": "P"}))
    assert ChatTemplate.from_directory(tmp_path).render([]) == "EP"


def test_directory_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no chat_template\.json"):
        ChatTemplate.from_directory(tmp_path)


def test_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja: not readable as UTF-8"):
        ChatTemplate.from_directory(tmp_path)


def test_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(UserError, match="does not parse"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no tools') }}", "{{ ''.__class__.__mro__ }}", "{{ x.y.z }}", "{{ 1 // 0 }}"]
)
def test_refusal_of_the_template_is_one_line(source: str) -> None:
    messages: list[dict[str, Any]] = []
    with pytest.raises(UserError, match="chat template refuses"):
        ChatTemplate(source, {}).render(messages)
