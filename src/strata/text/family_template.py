"""The chat template of the built-in models, and of a checkpoint of our families that carries none.

A plain statement of the format these families are trained on: turns between ``<|im_start|>`` and ``<|im_end|>``,
reasoning between ``<think>`` tags, tool calls as ``<tool_call><function=name><parameter=key>`` blocks, tool
results inside a user turn. It must not know how it is rendered; ``chat.py`` does that.
"""

from __future__ import annotations

__all__ = ["FAMILY_TEMPLATE"]

FAMILY_TEMPLATE = r"""
{%- macro words(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none and content is defined -%}
        {%- for part in content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('Only text parts can be read, not ' ~ part.type) -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if not messages -%}
    {{- raise_exception('A conversation needs at least one message') -}}
{%- endif -%}
{%- set leads = messages[0].role in ['system', 'developer'] -%}
{%- if tools -%}
    {{- '<|im_start|>system\n# Tools\n\nThese functions can be called, one JSON description a line:\n\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\n' ~ (tool | tojson) -}}
    {%- endfor -%}
    {{- '\n</tools>\n\nTo call one, answer with a block of this form and nothing after it:\n\n' -}}
    {{- '<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>' -}}
    {%- if leads -%}
        {{- '\n\n' ~ words(messages[0].content) -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- elif leads -%}
    {{- '<|im_start|>system\n' ~ words(messages[0].content) ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ['system', 'developer'] -%}
        {%- if not loop.first -%}
            {{- raise_exception('A system message can only come first') -}}
        {%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- '<|im_start|>user\n' ~ words(message.content) ~ '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if message.reasoning_content -%}
            {{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' -}}
        {%- endif -%}
        {{- words(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- if call.function -%}
                {%- set call = call.function -%}
            {%- endif -%}
            {%- if not loop.first or message.content -%}
                {{- '\n' -}}
            {%- endif -%}
            {{- '<tool_call>\n<function=' ~ call.name ~ '>\n' -}}
            {%- for key, value in call.arguments.items() -%}
                {{- '<parameter=' ~ key ~ '>\n' -}}
                {{- value if value is string else value | tojson -}}
                {{- '\n</parameter>\n' -}}
            {%- endfor -%}
            {{- '</function>\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\n<tool_response>\n' ~ words(message.content) ~ '\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('Unknown role: ' ~ message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}
        {{- '<think>\n\n</think>\n\n' -}}
    {%- endif -%}
{%- endif -%}
""".strip()
