"""The workload that step benchmarks share: small Qwen2 models with a tokenizer, prompts, and commands of runs."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import torch
from measure import HERE, Step
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LEARNING_RATE = 1e-5
MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template with which a prompt has one token per letter."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2 with tied embeddings and two query heads for each key/value head."""

    hidden: int
    layers: int
    intermediate: int
    vocabulary: int

    def sized(self, vocabulary: int) -> Shape:
        return dataclasses.replace(self, vocabulary=vocabulary)


SMALL = Shape(hidden=256, layers=4, intermediate=640, vocabulary=480)
"""2.9 million parameters."""


def save_model(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Write a model with random weights and its tokenizer to a folder, and return the number of parameters.

    Runs sample past the end-of-sequence token `<end>`, so every response has the maximum length.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer(shape.vocabulary), pad_token="<pad>", eos_token="<end>"
    )
    fast.chat_template = MESSAGES
    fast.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def character_tokenizer(vocabulary: int) -> Tokenizer:
    """Return a byte-level tokenizer: one token per ASCII character, and additional tokens up to `vocabulary`."""
    tokens = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{index}" for index in range(len(tokens), vocabulary - 1)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate([*tokens, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def prompt_texts(count: int, tokens: int, seed: int = 0) -> list[str]:
    """Return `count` random prompts of exactly `tokens` letters, each of which is one token."""
    rng = random.Random(seed)
    return ["".join(rng.choices(ascii_lowercase, k=tokens)) for _ in range(count)]


def write_prompts(file: Path, texts: Sequence[str]) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class Work:
    """One training step: `prompts` x `samples` responses of exactly `new_tokens`, one optimizer step."""

    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 121
    new_tokens: int = 64

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return self.prompts * self.samples * self.new_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences, prompts included."""
        return self.prompts * self.samples * (self.prompt_tokens + self.new_tokens)


def run_command(
    folder: Path,
    model: Path,
    work: Work,
    steps: int,
    strategy: str,
    overrides: Sequence[str],
    name: str = "run",
    tree: Path = HERE.parents[1],
) -> list[str]:
    """Return the command of a colocated training run on the CPU, with defaults for all keys that the work does not set.

    Args:
        folder: The folder with `prompts.jsonl`, in which the run's folder is created.
        model: The folder of the model.
        work: The work of one step.
        steps: The number of steps.
        strategy: The value of `trainer.strategy`.
        overrides: Further `key=value` arguments.
        name: The name of the run's folder.
        tree: The source tree whose script runs, because the script uses internals of the package.
    """
    keys = {
        "device": "cpu",
        "environment.env_class": "even_digits",
        "data.train_data": f"['{folder / 'prompts.jsonl'}']",
        "trainer.plugins": "[even_digits]",
        "trainer.logger": "[]",
        "trainer.strategy": strategy,
        "trainer.policy.model.path": model,
        "trainer.policy.optimizer_config.lr": LEARNING_RATE,
        "trainer.ckpt_path": folder / name,
        "trainer.export_path": folder / name / "export",
        "trainer.train_batch_size": work.prompts,
        "trainer.policy_mini_batch_size": work.prompts,
        "trainer.max_tokens_per_microbatch": work.tokens,
        "trainer.max_prompt_length": work.prompt_tokens,
        "trainer.gradient_checkpointing": "false",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.max_steps": steps,
        "trainer.eval_before_train": "false",
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "generator.n_samples_per_prompt": work.samples,
        "generator.sampling_params.max_generate_length": work.new_tokens,
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    return [sys.executable, str(tree / "scripts" / "benchmarks" / "gated_run.py"), *arguments, *overrides]


def assert_did(work: Work, steps: Sequence[Step]) -> None:
    """Raise AssertionError unless the run's own metrics show that each step did exactly this work."""
    expected = {
        "rollouts/tokens": work.sampled,
        "rollouts/trajectories": work.prompts * work.samples,
        "response/max_tokens": work.new_tokens,
    }
    for step in steps:
        actual = {name: step.reported[name] for name in expected}
        assert actual == expected, f"{actual} instead of {expected}"
