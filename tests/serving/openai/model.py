"""A served model whose chat template writes tools as Qwen's do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny import build_tiny
from trt_eagle3.decode.llm import LLM, load
from trt_eagle3.decode.request.request import Chunk, Generation
from trt_eagle3.decode.sampling.logprobs import TokenLogprob
from trt_eagle3.serving import ServingConfig
from trt_eagle3.serving.served_model import ServedModel

__all__ = [
    "SERVING",
    "TEMPLATE",
    "WEATHER",
    "generation",
    "load_with_tools",
    "pieces",
    "served",
    "sse",
]

SERVING = ServingConfig(max_body_bytes=1 << 20)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = """
{%- macro body(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image'
else part.text }}{% endfor %}{% endif %}{% endmacro -%}
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ body(message.content) }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{% if thinking %}<think>
{% endif -%}
"""


def load_with_tools(folder: Path, template: str = TEMPLATE, **options: Any) -> LLM:
    """The tiny pair under a template."""
    bundle = build_tiny(folder, **options)
    (bundle / "processor" / "chat_template.jinja").write_text(template)
    return load(bundle, media=SERVING.media())


def served(engine: LLM, serving: ServingConfig = SERVING) -> ServedModel:
    return ServedModel.of(engine, serving)


def generation(
    text: str,
    token_ids: Sequence[int] = (1, 2, 3),
    finish_reason: Any = "stop",
    logprobs: Sequence[TokenLogprob] = (),
) -> Generation:
    return Generation(
        text, tuple(token_ids), 5, finish_reason, 3.0, (3,), 1.0, 1.0, tuple(logprobs)
    )


def pieces(text: str, size: int = 3, finish_reason: Any = "stop") -> list[Chunk]:
    """``text`` as chunks of ``size`` characters."""
    cut = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    return [
        Chunk((1,), part, finish_reason if i == len(cut) - 1 else None)
        for i, part in enumerate(cut)
    ]


def sse(text: str) -> list[Any]:
    """The objects of server-sent events; ``[DONE]`` stays text."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
