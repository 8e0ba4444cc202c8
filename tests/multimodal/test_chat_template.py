"""Rendering equals transformers', and each place of a template is found."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.multimodal.record_goldens import CHAT_TEMPLATE
from trt_eagle3.errors import UserError
from trt_eagle3.multimodal import template_process
from trt_eagle3.multimodal.chat_template import ChatTemplate

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "What? <b>&"}, {"type": "video"}],
    },
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "Sure?"},
]
MARKED = (
    "{% for message in messages %}{% generation %}{{ message.role }}{% endgeneration "
    "%}{{ message.content | tojson }}{{ eos_token }}{% if loop.last %}{% break %}{% "
    "endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, MARKED], ids=["qwen", "marked"])
def test_prompt_equals_hf(source: str) -> None:
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=source, add_generation_prompt=True, eos_token="<|im_end|>"
    )
    assert ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(CONVERSATION) == expected[0]


TRIMMING = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
    "{{ message.content | trim }}{% else %}{% for part in message.content %}"
    "{{ part.text | default('*') | trim }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FINALS: list[Any] = [
    "Two cats",
    "Two cats, \n",
    "",
    "Two CONTINUE_FINAL_MESSAGE_TAG cats",
    [{"type": "text", "text": "Two"}, {"type": "text", "text": " cats "}],
]


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRIMMING], ids=["qwen", "trimming"])
@pytest.mark.parametrize("final", FINALS)
def test_continued_final_message_equals_hf(source: str, final: Any) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": final}]
    [expected], _ = render_jinja_template(
        [messages], chat_template=source, continue_final_message=True
    )
    assert ChatTemplate(source, {}).render(messages, ending="final_message") == expected


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, TRIMMING], ids=["qwen", "trimming"])
def test_prompt_without_generation_prompt_equals_hf(source: str) -> None:
    [expected], _ = render_jinja_template([CONVERSATION], chat_template=source)
    assert ChatTemplate(source, {}).render(CONVERSATION, ending="last_turn") == expected


def test_final_message_without_text_is_refused() -> None:
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(UserError, match="continue_final_message: the final message has no text"):
        ChatTemplate(CHAT_TEMPLATE, {}).render(messages, ending="final_message")


def test_final_message_that_the_template_hides_is_refused() -> None:
    source = "{% for message in messages %}{{ message.content[:4] }}{% endfor %}"
    with pytest.raises(UserError, match="continue_final_message: the checkpoint's chat template"):
        ChatTemplate(source, {}).render(
            [{"role": "assistant", "content": "a text of some length"}], ending="final_message"
        )


def test_missing_turn_would_be_noticed() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    assert template.render(CONVERSATION) != template.render(CONVERSATION[1:])


KNOWS_FEW_ROLES = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}{% for "
    "message in messages %}{% if message.role in ('user', 'assistant') %}({% if "
    "message.content is string %}{{ message.content | trim }}{% else %}{{ "
    "message.content[-1].text }}{% endif %}){% endif %}{% endfor %}"
)
USER, SYSTEM = {"role": "user", "content": " hi "}, {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("messages", "left_out"),
    [
        ([USER, SYSTEM], "message 2 (role 'system')"),
        ([SYSTEM, USER, SYSTEM], "message 3 (role 'system')"),
        ([{"role": "developer", "content": "Be brief."}, USER], "message 1 (role 'developer')"),
        (
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            "message 1 (role 'user')",
        ),
    ],
)
def test_message_that_the_template_would_drop_is_refused(
    messages: list[Any], left_out: str
) -> None:
    with pytest.raises(UserError, match=re.escape(left_out)):
        ChatTemplate(KNOWS_FEW_ROLES, {}).render(messages)


REFUSES_TWO = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message') }}{% endif %}"
    "[{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}]{% endfor %}"
)
KIND = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (KNOWS_FEW_ROLES, [SYSTEM, SYSTEM, USER], "[Be brief.\n\nBe brief.](hi)"),
        (
            REFUSES_TWO,
            [SYSTEM, SYSTEM, SYSTEM, USER],
            "[Be brief.\n\nBe brief.\n\nBe brief.][ hi ]",
        ),
        (REFUSES_TWO, [SYSTEM, KIND, USER], "[Be brief.\n\nBe kind.][ hi ]"),
        (REFUSES_TWO, [KIND, SYSTEM, USER], "[Be kind.\n\nBe brief.][ hi ]"),
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}",
            [SYSTEM, SYSTEM],
            "[Be brief.]" * 2,
        ),
    ],
    ids=["drops", "refuses", "parts", "parts first", "takes two"],
)
def test_leading_systems_are_joined_where_the_template_refuses_two(
    source: str, messages: list[Any], expected: str
) -> None:
    assert ChatTemplate(source, {}).render(messages) == expected


PARTS_ONLY = (
    "{% for message in messages %}[{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}]{% endfor %}"
)


def test_text_becomes_a_part_where_the_template_takes_only_parts() -> None:
    """DeepSeek-VL's template drops texts, as the characters of a text have no type."""
    template = ChatTemplate(PARTS_ONLY, {})
    assert template.render([SYSTEM, KIND, USER]) == "[Be brief.][Be kind.][ hi ]"
    assert template.render([SYSTEM, USER], ending="final_message") == "[Be brief.][ hi "


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
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "default", "template": "found"}]}),
        ),
    ],
)
def test_template_is_found_in(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert ChatTemplate.from_directory(tmp_path, processor=True).render([]) == "found"


def test_special_tokens_come_from_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ pad_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "E"}, "pad_token": "P"})
    )
    assert ChatTemplate.from_directory(tmp_path, processor=True).render([]) == "EP"


def test_directory_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no chat_template\.json"):
        ChatTemplate.from_directory(tmp_path, processor=True)


def test_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja: not UTF-8"):
        ChatTemplate.from_directory(tmp_path, processor=True)


def test_template_that_does_not_parse_is_refused() -> None:
    with pytest.raises(UserError, match="does not parse"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no tools') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ x.y.z }}",
        "{{ 1 // 0 }}",
    ],
)
def test_refusal_of_the_template_is_one_line(source: str) -> None:
    messages: list[dict[str, Any]] = []
    with pytest.raises(UserError, match="chat template refuses"):
        ChatTemplate(source, {}).render(messages)


HOSTILE = {
    "long text": ("{{ 'a' * 10**10 }}", "MemoryError"),
    "padded text": ("{{ 'a'.center(10**11) }}", "MemoryError"),
    "doubled text": (
        "{% set n = namespace(s='x') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s "
        "%}{% endfor %}",
        "MemoryError|stopped, it took",
    ),
    "long number": ("{{ 7 ** (9 ** 9) }}", "stopped, it took|MemoryError|4300"),
    "long output": (
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        "characters, expected at most",
    ),
    "endless macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "nested lists": (
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] "
        "%}{% endfor %}{{ n.s }}",
        "MemoryError|stopped, it took",
    ),
    "long refusal": ("{{ raise_exception('no\n' * 99999) }}", "refuses them"),
    "deep": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "does not parse"),
    "long": ("x" * (2 << 20), "expected at most"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_template_is_one_line_soon_and_the_next_is_rendered(case: str) -> None:
    source, message = HOSTILE[case]
    start = time.monotonic()
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate(source, {}).render([])
    assert time.monotonic() - start < 30
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(CONVERSATION)


def test_worker_that_was_killed_is_replaced() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    [process] = template_process._PROCESS._all
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert template.render(CONVERSATION)


def test_worker_ends_with_its_owner_and_leaves_no_zombie() -> None:
    ChatTemplate(CHAT_TEMPLATE, {})
    [process] = template_process._PROCESS._all
    template_process._PROCESS.close()
    assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_fork_of_the_program_asks_a_worker_of_its_own() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    expected = template.render(CONVERSATION)
    [process] = template_process._PROCESS._all
    pid = os.fork()
    if pid == 0:
        ours = (
            template.render(CONVERSATION) == expected
            and process not in template_process._PROCESS._all
        )
        template_process._PROCESS.close()
        os._exit(0 if ours else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert template.render(CONVERSATION) == expected


def test_threads_get_their_own_texts() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    messages = [[{"role": "user", "content": f"number {i}"}] for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(template.render, messages))
    assert all(f"number {i}<|im_end|>" in text for i, text in enumerate(texts))


def test_text_that_is_no_unicode_comes_back_as_it_went() -> None:
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render(
            [{"role": "user", "content": "\ud800"}]
        )
        == "\ud800"
    )


@pytest.mark.parametrize(
    "value",
    [[1], [{"template": "x"}], [{"name": ["default"], "template": "x"}], {"default": 1}, 5, [None]],
)
def test_malformed_template_of_a_config_is_one_line(tmp_path: Path, value: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template: expected"):
        ChatTemplate.from_directory(tmp_path, processor=True)


@pytest.mark.parametrize(
    "name",
    ["chat_template.json", "chat_template.jinja", "tokenizer_config.json", "processor_config.json"],
)
def test_template_file_that_is_a_fifo_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="got a FIFO"):
        ChatTemplate.from_directory(tmp_path, processor=True)


TOOLS = (
    "{%- if tools %}# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n{% endif -%}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}'
    "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}\n"
    "</tool_call>{% endfor %}{% endfor -%}"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}
CALLING = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    },
    {"role": "tool", "content": "42"},
]


def test_tools_and_calls_equal_hf() -> None:
    expected, _ = render_jinja_template([CALLING], tools=[TOOL], chat_template=TOOLS)
    found = ChatTemplate(TOOLS, {}).render(CALLING, [TOOL])
    assert found == expected[0]
    assert '"arguments": {"a":1}' in found


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([USER], [TOOL], "tools: the checkpoint's chat template leaves them out"),
        (CALLING, [], "leaves out the tool_calls of message 2"),
    ],
)
def test_template_that_knows_no_tools_is_refused_them(
    messages: list[Any], tools: list[Any], expected: str
) -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(UserError, match=expected):
        ChatTemplate(plain, {}).render(messages, tools)


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("{{ messages[0].content }}", {}, "none"),
        (TOOLS, {}, "optional"),
        (TOOLS, {"enable_thinking": False}, "none"),
        ("{{ messages[0].content }}<|im_start|>assistant\n<think>\n", {}, "open"),
    ],
)
def test_reasoning_is_what_the_prompt_ends_with(
    source: str, options: dict[str, Any], expected: str
) -> None:
    assert ChatTemplate(source, {}).reasoning(options).mode == expected


def test_reasoning_is_that_of_requests_with_tools_where_these_differ() -> None:
    opens, ends = "<think>\n", "<think>\n\n</think>\n\n"
    one = ChatTemplate("{% if tools %}" + ends + "{% else %}" + opens + "{% endif %}", {})
    two = ChatTemplate(opens, {}, ends)
    for template in (one, two):
        modes = [template.reasoning(with_tools=tools).mode for tools in (False, True)]
        assert modes == ["open", "none"]
