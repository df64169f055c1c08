"""Create the initial model, a smaller version of the quickstart's, which mostly answers without steps."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from skyrl_train.environments.tasks.arithmetic import generate

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
from model import make_model, make_tokenizer

OPERATIONS, MAX_VALUE = 3, 2
STEPWISE = 0.4
"""Fraction of demonstrations that work step by step."""
BATCH = 32


def problems(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Return rows with "question", "answer" (with steps) and "direct". No expression is in both splits."""
    return [row["extra_info"] for row in generate(count, OPERATIONS, MAX_VALUE, seed, split)]


def warm_up(seed: int, steps: int) -> tuple[Any, Any]:
    """Train on demonstrations of both kinds; return model and tokenizer."""
    rows = problems(4_000, seed, "train")
    tokenizer = make_tokenizer([row["question"] + "\n" + row["answer"] for row in rows])
    model = make_model(len(tokenizer), seed, hidden_size=96, layers=2)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=max(steps, 2), pct_start=0.1)
    for step in range(1, steps + 1):
        pairs = [(row["question"], row["answer" if rng.random() < STEPWISE else "direct"]) for row in sample(rng, rows)]
        loss = model(**make_batch(tokenizer, pairs)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"warm-up step {step}/{steps}: loss {loss:.3f}", flush=True)
    return model.eval(), tokenizer


def sample(rng: random.Random, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[rng.randrange(len(rows))] for _ in range(BATCH)]


def make_batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Return token ids and labels [B, T], padded on the right; only answers have labels."""
    texts = [tokenizer.apply_chat_template(prompt(q), add_generation_prompt=True, tokenize=False) for q, _ in pairs]
    prompts = tokenizer(texts)["input_ids"]
    answers = tokenizer([answer + tokenizer.eos_token for _, answer in pairs])["input_ids"]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    gaps = [width - len(p) - len(a) for p, a in zip(prompts, answers, strict=True)]
    ids = [p + a + [0] * gap for p, a, gap in zip(prompts, answers, gaps, strict=True)]
    labels = [[-100] * len(p) + a + [-100] * gap for p, a, gap in zip(prompts, answers, gaps, strict=True)]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
