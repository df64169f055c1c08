"""Run the TRL side of grpo_step.py, with a barrier before every step: `python trl_grpo.py FOLDER '{"work": ...}'`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from even_digits import even_share
from measure import StepBarrier
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import LEARNING_RATE, Work

COUNTS = ("num_tokens", "completions/min_length", "completions/max_length")


class Measured(GRPOTrainer):
    """A GRPOTrainer that records the time of generation, all of which runs in this process."""

    generation_s = generation_cpu_s = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start, used = time.perf_counter(), time.process_time()
        output = super()._generate_single_turn(*args, **kwargs)
        self.generation_s, self.generation_cpu_s = time.perf_counter() - start, time.process_time() - used
        return output


class BetweenSteps(TrainerCallback):
    """A callback that waits at the barrier between steps. A step lasts from one `on_log` to the next."""

    def __init__(self) -> None:
        self.gate = StepBarrier()
        self.trainer: Measured | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.gate.wait()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs["logs"]
        if COUNTS[0] not in logs:  # the final summary
            return
        assert self.trainer is not None
        times = {"generation_s": self.trainer.generation_s, "generation_cpu_s": self.trainer.generation_cpu_s}
        self.gate.wait({name: logs[name] for name in COUNTS} | times)


def reward(completions: list[list[dict[str, str]]], **_: Any) -> Any:
    return [even_share(messages[0]["content"]) for messages in completions]


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    work = Work(**options["work"])
    torch.set_num_threads(options["threads"])
    callback = BetweenSteps()
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=options["steps"],
        per_device_train_batch_size=work.prompts * work.samples,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        num_iterations=1,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Measured(
        model=AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options["model"]),
        reward_funcs=reward,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
