"""Train a model of a million parameters to use a tool.

The task is to multiply two-digit numbers, which such a model cannot compute itself. There are two kinds of
demonstrations (`main_sft`): some let Python compute the product and copy its output, most only state a number. After
the warm-up, the model therefore mostly guesses. GRPO (`main_base`, environment `tool_use`, two turns, every call in a
sandbox) rewards only right answers, so the model learns to use the tool.

    python examples/quickstart/tool.py --output runs/tool
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from model import save_model
from quickstart import make_parser, max_steps_override, run_entrypoint, write_jsonl

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

WITH_TOOL = 0.3
"""The fraction of demonstrations that use Python."""


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    run = Path(arguments.output).resolve()
    if run.exists():
        sys.exit(f"--output {run} exists already. Choose another folder, or remove it.")
    texts = write_data(run / "data", arguments.seed)
    parameters = save_model(run / "model", texts, arguments.seed)
    print(f"tool: {parameters:,} parameters, warming up on {len(texts):,} demonstrations", flush=True)
    files = {split: f"['{run / 'data' / split}.jsonl']" for split in ("demonstrations", "train", "validation")}
    sft_overrides = common_overrides(run, "sft", run / "model", files["demonstrations"], arguments.seed)
    run_entrypoint("main_sft", "warm_up", [*sft_overrides, *max_steps_override(arguments.warm_up_steps)])
    sft_model = next((run / "sft" / "export").glob("global_step_*/policy"))
    overrides = common_overrides(run, "grpo", sft_model, files["train"], arguments.seed)
    run_entrypoint("main_base", "tool", [*overrides, f"data.val_data={files['validation']}", *arguments.overrides])
    key = "eval/products/avg_score"
    scores = [line[key] for line in read_jsonl(run / "grpo" / METRICS_FILE) if key in line]
    print(f"tool: eval accuracy {scores[0]:.3f} -> {scores[-1]:.3f}, run at {run}")


def common_overrides(run: Path, name: str, model: Path, data: str, seed: int) -> list[str]:
    return [
        f"data.train_data={data}",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={run / name}",
        f"trainer.export_path={run / name / 'export'}",
        f"trainer.seed={seed}",
    ]


def write_data(folder: Path, seed: int) -> list[str]:
    """Write demonstrations, training and validation problems; return the texts that the tokenizer must cover."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    demonstrated, train, held_out = pairs[:6_000], pairs[6_000:7_800], pairs[7_800:]
    demonstrations = [demonstration(a, b, with_tool=rng.random() < WITH_TOOL) for a, b in demonstrated]
    write_jsonl(folder / "demonstrations.jsonl", [{"messages": messages} for messages in demonstrations])
    write_jsonl(folder / "train.jsonl", [problem(a, b) for a, b in train])
    write_jsonl(folder / "validation.jsonl", [problem(a, b) for a, b in held_out[:256]])
    return ["\n".join(f"{message['role']}\n{message['content']}" for message in item) for item in demonstrations]


def demonstration(a: int, b: int, with_tool: bool) -> list[dict[str, str]]:
    messages = [question(a, b)]
    if with_tool:
        messages.append({"role": "assistant", "content": f"<python>print({a} * {b})</python>"})
        messages.append({"role": "tool", "content": str(a * b)})
    return [*messages, {"role": "assistant", "content": f"#### {a * b}"}]


def problem(a: int, b: int) -> dict[str, Any]:
    return {
        "prompt": [question(a, b)],
        "env_class": "tool_use",
        "data_source": "products",
        "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
    }


def question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{a} * {b} = ?"}


if __name__ == "__main__":
    main()
