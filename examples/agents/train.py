"""Train a model of a million parameters with an existing agent.

The questions need products of two-digit numbers, which such a model cannot compute. There are two kinds of
demonstrations (`main_sft`): some call the tool `multiply` and copy its result, most only say that they do not know.
After the warm-up, the model therefore mostly gives up. In GRPO (`main_base`, environment `agent`) a program that is no
part of the trainer asks the model and runs its tool calls. Only right answers are rewarded, so the model learns to call
the tool.

    python -m examples.agents.train --output runs/agent
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from examples.agents.calculator import MULTIPLY
from examples.quickstart.model import make_model, make_tokenizer
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

HERE = Path(__file__).parent
WITH_TOOL = 0.3
"""The fraction of demonstrations that call the tool."""
THINGS = ("pens", "apples", "books", "coins", "eggs")
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson)"
    " + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with calls in the format of Hermes and Qwen. Of a tool it shows only the name, to keep prompts short."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/agent", help="new folder for the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up-steps", type=int, help="maximum number of SFT steps")
    parser.add_argument("--python", help="interpreter with openai-agents, whose agent is then trained")
    parser.add_argument("overrides", nargs="*", help="key=value for the GRPO run")
    arguments = parser.parse_args()
    run = Path(arguments.output).resolve()
    if run.exists():
        sys.exit(f"--output {run} exists already. Choose another folder, or remove it.")
    texts = write_data(run / "data", arguments.seed)
    parameters = save_model(run / "model", texts, arguments.seed)
    print(f"agent: {parameters:,} parameters, warming up on {len(texts):,} demonstrations", flush=True)
    steps = [] if arguments.warm_up_steps is None else [f"trainer.max_steps={arguments.warm_up_steps}"]
    files = {split: f"['{run / 'data' / split}.jsonl']" for split in ("demonstrations", "train", "validation")}
    start("main_sft", "warm_up", [*common(run, "sft", run / "model", files["demonstrations"], arguments.seed), *steps])
    model = next((run / "sft" / "export").glob("global_step_*/policy"))
    overrides = [*common(run, "grpo", model, files["train"], arguments.seed), f"data.val_data={files['validation']}"]
    start("main_base", "agent", [*overrides, *agent_overrides(arguments.python), *arguments.overrides])
    scores = [line for line in read_jsonl(run / "grpo" / METRICS_FILE) if "eval/products/avg_score" in line]
    first, last = (scores[index]["eval/products/avg_score"] for index in (0, -1))
    print(f"agent: eval accuracy {first:.3f} -> {last:.3f}, run at {run}")


def agent_overrides(python: str | None) -> list[str]:
    """Return the settings of the agent: that of calculator.py, or that of openai-agents in another interpreter."""
    key = "environment.skyrl_gym.agent"
    if python is None:
        return [f"{key}.run=examples.agents.calculator:run"]
    return [f"{key}.run=examples.agents.openai_agents_calculator:run", f"{key}.python={python}", f"{key}.reward=gsm8k"]


def common(run: Path, name: str, model: Path, data: str, seed: int) -> list[str]:
    return [
        f"data.train_data={data}",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={run / name}",
        f"trainer.export_path={run / name / 'export'}",
        f"trainer.seed={seed}",
    ]


def start(entrypoint: str, preset: str, overrides: list[str]) -> None:
    """Start an entrypoint as a user would, with one of the presets in this folder."""
    module = f"skyrl_train.entrypoints.{entrypoint}"
    command = [sys.executable, "-m", module, "--config-dir", str(HERE), "--config-name", preset, *overrides]
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True)


def write_data(folder: Path, seed: int) -> list[str]:
    """Write demonstrations, training and validation questions; return the texts that the tokenizer must cover."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    demonstrated, train, held_out = pairs[:6_000], pairs[6_000:7_800], pairs[7_800:]
    demonstrations = [demonstration(a, b, rng) for a, b in demonstrated]
    rows: list[dict[str, Any]] = [{"messages": item, "tools": [MULTIPLY]} for item in demonstrations]
    write_jsonl(folder / "demonstrations.jsonl", rows)
    write_jsonl(folder / "train.jsonl", [problem(a, b, rng) for a, b in train])
    write_jsonl(folder / "validation.jsonl", [problem(a, b, rng) for a, b in held_out[:128]])
    return [text_of(messages) for messages in demonstrations]


def demonstration(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    asked = question(a, b, rng)
    if rng.random() >= WITH_TOOL:
        return [asked, {"role": "assistant", "content": "I do not know."}]
    call = {"id": "call", "type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": f"product: {a * b}"},
        {"role": "assistant", "content": f"#### {a * b}"},
    ]


def problem(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": [question(a, b, rng)],
        "data_source": "products",
        "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
    }


def question(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    thing = rng.choice(THINGS)
    return {"role": "user", "content": f"There are {a} boxes with {b} {thing} each. How many {thing} are there?"}


def text_of(messages: list[dict[str, Any]]) -> str:
    """Return all words of a demonstration, as the chat template writes them."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    texts = ["system\nTools: multiply", *(f"{message['role']}\n{message['content']}" for message in messages)]
    return "\n".join([*texts, *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls)])


def save_model(folder: Path, texts: list[str], seed: int) -> int:
    """Save a new model, and a tokenizer for `texts`, to a Hugging Face folder; return the number of parameters."""
    tokenizer = make_tokenizer(texts)
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make_model(len(tokenizer), seed)
    disable_progress_bar()
    logging.getLogger("DeepSpeed").disabled = True  # it warns about the missing GPU if it is installed
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
