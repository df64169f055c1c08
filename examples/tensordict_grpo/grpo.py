"""Train with GRPO using only the tensordict parts. The same command with the same --output resumes the run.

python examples/tensordict_grpo/grpo.py --output runs/tensordict_grpo
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from warm_up import problems, warm_up

from skyrl_train.tensordict import GRPOLoss, GSM8KEnv, LLMCollector, MCAdvantage, TransformersWrapper

PROMPTS, SAMPLES, RATE, SEED = 16, 8, 5e-4, 0
SAMPLING = {"max_new_tokens": 28, "temperature": 1.0}


def train(run: Path, steps: int, warm_up_steps: int = 400, prompts: int = PROMPTS) -> tuple[float, float]:
    """Train, resuming from the checkpoint in `run` if any; return greedy held-out accuracy before and after."""
    checkpoint, rows = run / "checkpoint.pt", prompts * SAMPLES
    saved = torch.load(checkpoint) if checkpoint.exists() else None
    start = saved["step"] if saved else 0
    model, tokenizer = warm_up(SEED, 0 if saved else warm_up_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    loss = GRPOLoss(TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False))
    buffer = ReplayBuffer(storage=LazyStackStorage(rows), sampler=SamplerWithoutReplacement(), batch_size=rows // 2)
    buffer.append_transform(MCAdvantage(SAMPLES, prompt_key="question"))
    data: dict[str, Any] = {"system_prompt": "", "num_envs": rows, "repeats": SAMPLES, "seed": start}
    with LLMCollector(
        GSM8KEnv(dataset=problems(4_000, SEED + 1, "train"), **data),
        policy_factory=lambda: TransformersWrapper(copy.deepcopy(model), tokenizer=tokenizer, generate_kwargs=SAMPLING),
        dialog_turns_per_batch=rows,
        replay_buffer=buffer,
        track_policy_version=True,
    ) as collector:
        before = accuracy(collector.policy)
        for step, _ in zip(range(start + 1, steps + 1), collector, strict=False):
            for batch in buffer:
                output = loss(batch)
                output.loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            buffer.empty()
            collector.update_policy_weights_(model)
            saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, checkpoint.with_suffix(".tmp"))
            # The replacement is atomic: the file is either this checkpoint or the previous one.
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            right = batch["next", "success"].float().mean()
            print(f"step {step}: right {right:.3f}, entropy {output.entropy:.3f}, ESS {output.ESS:.3f}", flush=True)
        return before, accuracy(collector.policy)


def accuracy(policy: Any) -> float:
    """Return the fraction of held-out problems that greedy decoding answers correctly."""
    held_out = problems(128, SEED + 2, "validation")
    greedy = policy.get_new_version(generate_kwargs={**SAMPLING, "temperature": 0.0})
    env = GSM8KEnv(dataset=held_out, shuffle=False, system_prompt="", num_envs=len(held_out))
    return float(env.rollout(1, greedy)["next", "success"].float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO with tensordict parts")
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoint.pt")
    parser.add_argument("--steps", type=int, default=16, help="total number of steps")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    print("tensordict_grpo: eval accuracy {:.3f} -> {:.3f}".format(*train(arguments.output, arguments.steps)))
