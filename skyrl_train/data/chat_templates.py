"""The built-in chat templates of `generator.chat_template.name_or_path`, for conversations without tools.

All templates except QWEN3_WITHOUT_THINKING only append to the rendered text of earlier turns. The tokenizer must have
the control tokens of its template.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template of Qwen2 and Qwen3. Reasoning remains in the history."""

LLAMA3 = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token or '' }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + (system if loop.first else '') + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Template of Gemma. A system message becomes the beginning of the first turn."""

MISTRAL = (
    "{{ bos_token or '' }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\n\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
"""Template of Mistral. A system message becomes the beginning of the first turn. The model's own template puts it into
the last turn, which rewrites the history."""

QWEN3_WITHOUT_THINKING = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template of Qwen3 that drops reasoning from earlier turns, like the model's own template. It requires
generator.step_wise_trajectories=true."""

TEMPLATES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3_with_thinking": CHATML,
    "qwen3_without_thinking": QWEN3_WITHOUT_THINKING,
}
