"""Tokenizers whose chat templates write tool calls as those of each model family do."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from skyrl_train.testing.tiny_models import byte_tokenizer


@dataclass(frozen=True)
class Family:
    """The chat template of a model family, reduced to what it writes for tools, reasoning and calls."""

    template: str
    special: tuple[str, ...] = ()
    """Special tokens, which decoding drops."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    calls_per_turn: int = 2
    has_content: bool = True
    """True if the template writes content before calls."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer with this template, which encodes every byte as a token."""
        tokenizer = byte_tokenizer()
        tokens = [AddedToken(token, special=True, normalized=False) for token in self.special]
        tokens += [AddedToken(token, special=False, normalized=False) for token in self.added]
        tokenizer.add_tokens(tokens)
        tokenizer.chat_template = self.template
        return tokenizer


def _chatml(call: str, after: str = "", before: str = "\\n") -> str:
    """Return ChatML with Qwen's handling of reasoning, and `call` for each call."""
    return (
        """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}
{%- set content = m.content or '' %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for c in m.tool_calls or [] %}
{%- if content or not loop.first %}{{ '"""
        + before
        + """' }}{% endif %}"""
        + call
        + """{%- endfor %}"""
        + after
        + """{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    )


_HERMES = """{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}"""
_QWEN3_CODER = """{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}"""
_GLM = """{{- '<tool_call>' + c.function.name }}
{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""
_LFM2 = """{{- '<|tool_call_start|>[' if loop.first else ', ' }}{{ c.function.name }}(
{%- for key, value in c.function.arguments | items %}{{ ', ' if not loop.first }}{{ key }}=
{%- if value is string %}{{ "'" + value + "'" }}
{%- else %}{{ value | tojson if value is mapping else value | string }}{% endif %}
{%- endfor %}{{ ')' + (']<|tool_call_end|>' if loop.last else '') }}"""
_LLAMA = """{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('Only single tool-calls are supported!') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ (tools | tojson if loop.first and tools else '') + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def _mistral(calls: str) -> str:
    return (
        """{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}"""
        + calls
        + """{%- endfor %}{{- eos_token }}
{%- else %}{% if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
    )


_MISTRAL_TOKENS = (
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[THINK]", "[/THINK]"),
)


def _deepseek(call: str) -> str:
    return (
        """{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' if loop.first else '"""
        + ("\\n" if "```" in call else "")
        + """' }}{{ '<｜tool▁call▁begin｜>"""
        + call
        + """<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}{% endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜User｜>' + (tools | tojson if tools and loop.first else '') + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
    )


_DEEPSEEK_TOKENS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
_HARMONY = """{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{%- if m.content %}{{ '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- for c in m.tool_calls %}
{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}
{{- c.function.arguments | tojson + '<|call|>' }}
{%- endfor %}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% endif %}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


def _gemma(markers: tuple[str, str], quote: str) -> str:
    return (
        """{%- macro write(value) %}
{%- if value is string %}{{ '"""
        + quote
        + """' + value + '"""
        + quote
        + """' }}
{%- elif value is boolean %}{{ 'true' if value else 'false' }}
{%- elif value is none %}null
{%- elif value is mapping %}{
{%- for key, item in value | items %}{{ (',' if not loop.first else '') + key + ':' + write(item) }}{% endfor %}}
{%- elif value is sequence %}[{% for item in value %}{{ (',' if not loop.first else '') + write(item) }}{% endfor %}]
{%- else %}{{ value | string }}{% endif %}
{%- endmacro %}"""
        + _chatml(
            f"{{{{- '{markers[0]}call:' + c.function.name + write(c.function.arguments) + '{markers[1]}' }}}}",
            before="",
        )
    )


FAMILIES = {
    "hermes": Family(_chatml(_HERMES), added=("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "qwen3_coder": Family(_chatml(_QWEN3_CODER), added=("<tool_call>", "</tool_call>", "<think>", "</think>")),
    "glm": Family(_chatml(_GLM), added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")),
    "llama": Family(
        _LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        calls_per_turn=1,
        has_content=False,
    ),
    "mistral": Family(
        _mistral(
            """{{- '[TOOL_CALLS] [' if loop.first }}{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}
{{- ']' if loop.last else ', ' }}"""
        ),
        _MISTRAL_TOKENS,
    ),
    "mistral_args": Family(
        _mistral(
            "{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 characters long!') }}{% endif %}"
            "{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}"
        ),
        _MISTRAL_TOKENS,
    ),
    "deepseek_v3": Family(
        _deepseek(
            "function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments | tojson + '\\n```"
        ),
        added=_DEEPSEEK_TOKENS,
    ),
    "deepseek_v31": Family(
        _deepseek("' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '"), special=_DEEPSEEK_TOKENS
    ),
    "harmony": Family(
        _HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
    "gemma4": Family(
        _gemma(("<|tool_call>", "<tool_call|>"), '<|"|>'), special=("<|tool_call>", "<tool_call|>", '<|"|>')
    ),
    "functiongemma": Family(
        _gemma(("<start_function_call>", "<end_function_call>"), "<escape>"),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "lfm2": Family(_chatml(_LFM2, before=""), special=("<|tool_call_start|>", "<|tool_call_end|>")),
}
