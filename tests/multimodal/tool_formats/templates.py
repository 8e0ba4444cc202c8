"""Chat templates that teach tools in the style of each checkpoint, in words of our own."""

from __future__ import annotations

__all__ = ["LLAMA3", "QWEN3_5", "QWEN3_CODER", "QWEN3_VL"]

_BODY = """
{%- macro body(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image'
else part.text }}{% endfor %}{% endif %}{% endmacro -%}
"""
_XML_CALLS = """
{%- macro calls(message) %}{% for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string)
    else value | string }}
{{- '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}{% if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}{% endmacro -%}
"""
_XML_LESSON = """Call a function like this:

<tool_call>
<function=name_of_the_function>
<parameter=name_of_a_parameter>
its value
on as many lines as it has
</parameter>
</function>
</tool_call>"""

QWEN3_VL = (
    _BODY
    + """
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call a function like this:
<tool_call>
{"name": <name>, "arguments": <JSON object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ body(message.content) }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}
{{- call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""
)
"""Hermes' JSON, as Qwen2.5, Qwen3 and Qwen3-VL teach it."""

QWEN3_5 = (
    _BODY
    + _XML_CALLS
    + """
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
"""
    + _XML_LESSON
    + """<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is string %}{{ '<think>\\n' + message.reasoning_content }}
{{- '\\n</think>\\n\\n' }}{% endif -%}
{{ body(message.content) }}{{ calls(message) }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif -%}
"""
)
"""XML; the prompt opens the reasoning."""

QWEN3_CODER = (
    _BODY
    + _XML_CALLS
    + """
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{% set tool = tool.function %}
<function>
<name>{{ tool.name }}</name>
{%- for name, field in tool.parameters.properties | items %}
<parameter><name>{{ name }}</name><type>{{ field.type }}</type></parameter>
{%- endfor %}
</function>{% endfor %}
</tools>
"""
    + _XML_LESSON
    + """<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ body(message.content) }}{{ calls(message) }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""
)
"""XML, with the tools in XML too; no reasoning."""

LLAMA3 = """
{%- set turns = messages -%}
{%- if tools %}{% set turns = messages[1:] %}<|start_header_id|>user<|end_header_id|>

Answer with JSON if one of these functions helps, in the form
{"name": function name, "parameters": dictionary of argument name and its value}

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ messages[0].content | trim }}<|eot_id|>{% endif -%}
{%- for message in turns %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""JSON of Llama 3.1 and 3.2, which take one call at once."""
