"""Chat templates with tools that behave like those of families of models, and byte tokenizers with their tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}" + _TOOLS + "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}"
    '{% for call in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like Qwen3's: the last answer is rendered with an empty block of reasoning."""
LLAMA = (
    "{{ bos_token }}" + _TOOLS + "{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name + \'", '
    "\"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Like Llama 3's: it rejects several calls in one message."""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' }}" + _TOOLS + "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + ', \"call_id\": \"' + m.tool_call_id"
    " + '\"}[/TOOL_RESULTS]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""Like Mistral's: users and final answers alternate, and ids of calls are rendered."""
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}" + _TOOLS + "{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' and m.content is none %}{% set ns.tool = false %}"
    "{{ '<|Assistant|><|calls_begin|>' }}{% for call in m.tool_calls %}"
    "{{ '<|call_begin|>function<|sep|>' + call.function.name + '\n' + call.function.arguments + '<|call_end|>' }}"
    "{% endfor %}{{ '<|calls_end|><|end_of_sentence|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{% if not ns.tool %}{{ '<|Assistant|>' }}{% endif %}{% set ns.tool = false %}"
    "{{ m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}"
    "{% elif m.role == 'tool' %}{% if not ns.tool %}{{ '<|outputs_begin|>' }}{% endif %}{% set ns.tool = true %}"
    "{{ '<|output_begin|>' + m.content + '<|output_end|>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|outputs_end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<|Assistant|>' }}{% endif %}"
)
"""Like DeepSeek's: calls need null content and arguments as text, and an answer follows results without a header."""
HARMONY = (
    "{{ '<|start|>developer<|message|>' }}" + _TOOLS + "{{ '<|end|>' }}"
    "{% set ns = namespace(name=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('a result needs a call') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Like gpt-oss's: a result needs its call, and earlier answers end with another token than the last one."""
_CONTROLS = {
    "qwen": (QWEN, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "llama": (LLAMA, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": (
        MISTRAL,
        (
            *("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        ),
    ),
    "deepseek": (
        DEEPSEEK,
        (
            *("<|begin_of_sentence|>", "<|User|>", "<|Assistant|>", "<|calls_begin|>", "<|calls_end|>"),
            *("<|call_begin|>", "<|call_end|>", "<|sep|>", "<|outputs_begin|>", "<|outputs_end|>"),
            *("<|output_begin|>", "<|output_end|>", "<|end_of_sentence|>"),
        ),
    ),
    "harmony": (
        HARMONY,
        ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
}
"""Template of each family, and its control tokens: the first one begins a text, the last one ends it."""
FAMILIES = tuple(_CONTROLS)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with the control tokens of a family, and its template."""
    template, controls = _CONTROLS[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate([*controls, *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(controls))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=controls[0], eos_token=controls[-1], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer
