"""What a report of two made-up runs holds, in the form that the page reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

STEPS = 40
SAMPLES = 4
CALL = {"function": {"name": "calculator", "arguments": '{"expression": "17 * 3"}'}}


def report_data() -> dict[str, Any]:
    """Two runs: one with rollouts of three steps, one without any."""
    runs = [
        {**_run("0", "first", 40), "has_rollouts": True},
        {**_run("1", "lower <b>rate</b>", 30), "has_rollouts": False},
    ]
    differing = [{"key": "trainer.policy.optimizer_config.lr", "values": ["1e-06", "3e-06"]}]
    finding = {"step": 7, "level": "warning", "title": "truncated", "text": "61% of the responses were cut. Raise it."}
    return {
        "runs": {"runs": runs, "differing": differing},
        "metrics": {"0": metrics(40, 0), "1": metrics(30, 1)},
        "diagnosis": {"0": [finding], "1": []},
        "rollouts": {"0": rollouts(steps=(1, 2, 3), groups=6), "1": []},
    }


def _run(run: str, name: str, step: int) -> dict[str, Any]:
    return {
        "id": run,
        "name": name,
        "folder": f"/runs/{run}",
        "project": "made up",
        "step": step,
        "total_steps": 40,
        "state": "finished",
    }


def metrics(steps: int, seed: int) -> dict[str, Any]:
    """A row before the first step, with an evaluation; then one of every step."""
    noise = np.random.default_rng(seed).normal(size=(steps + 1, 4)).round(4)
    rise = [1 - math.exp(-step / 15) for step in range(steps + 1)]

    def column(values: list[float]) -> list[float | None]:
        return [None, *values[1:]]

    reward = [0.8 * part + 0.05 * float(one) for part, one in zip(rise, noise[:, 0], strict=True)]
    columns: dict[str, list[float | None]] = {
        "reward/mean": column(reward),
        "reward/p10": column([one - 0.2 for one in reward]),
        "reward/p90": column([one + 0.2 for one in reward]),
        "policy/entropy": column(
            [2 - 1.5 * part + 0.02 * float(one) for part, one in zip(rise, noise[:, 1], strict=True)]
        ),
        "policy/grad_norm": column([abs(float(one)) for one in noise[:, 2]]),
        "timing/step_s": column([6.0] * (steps + 1)),
        "timing/generate_s": column([3.5] * (steps + 1)),
        "timing/update_s": column([2.0] * (steps + 1)),
    }
    for source, shift in (("gsm8k", 0.0), ("math", -0.2)):
        columns[f"eval/{source}/avg_score"] = [
            0.7 * part + shift if step % 10 == 0 else None for step, part in enumerate(rise)
        ]
    described = {"reward/mean": "mean reward of the step's samples"}
    return {
        "steps": list(range(steps + 1)),
        "times": [1.8e9 + 60 * step for step in range(steps + 1)],
        "columns": columns,
        "described": described,
    }


def rollouts(steps: tuple[int, ...], groups: int) -> list[dict[str, Any]]:
    """Of every step so many groups of four samples; the sample numbered 3 of each asks a tool."""
    made = [sample(step, group, number) for step in steps for group in range(groups) for number in range(SAMPLES)]
    made[5] |= {"status": "failed", "reward": 0.0, "error": "timeout", "detail": "no answer within 30 s"}
    return made


def sample(step: int, group: int, number: int, answer: str | None = None) -> dict[str, Any]:
    """An episode whose tokens are the words of its prompt and its answers, spaces included."""
    random = np.random.default_rng([step, group, number])
    question = f"What is {group} + {step}?"
    answer = answer or f"I add {group} and {step}.\nThat makes {group + step}."
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    answers = [answer]
    if number == 3:
        answers = [answer, "So the answer is 51."]
        messages += [
            {"role": "assistant", "content": answer, "tool_calls": [CALL]},
            {"role": "tool", "name": "calculator", "content": "51"},
        ]
    messages.append({"role": "assistant", "content": answers[-1]})
    tokens, turns = _tokens(question, answers, random)
    return {
        "step": step,
        "uid": str(100 * step + group),
        "group": group,
        "sample": number,
        "source": "gsm8k" if group % 2 == 0 else "math",
        "reward": float(number % 2),
        "raw_reward": None,
        "status": "ok",
        "error": None,
        "detail": "",
        "stop_reason": "length" if number == 1 else "stop",
        "temperature": 1.0,
        "preview": answer.splitlines()[0],
        "env_metrics": {"no_answer": 0.0},
        "messages": messages,
        "turns": turns,
        "tokens": tokens,
    }


def _tokens(
    question: str, answers: list[str], random: np.random.Generator
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    prompt = _words(question)
    texts, trained, turns = list(prompt), [False] * len(prompt), []
    for turn, answer in enumerate(answers):
        if turn:
            texts, trained = [*texts, "51"], [*trained, False]  # what the tool said
        start = len(texts) - len(prompt)
        words = _words(answer)
        texts, trained = [*texts, *words], [*trained, *[True] * len(words)]
        turns.append(
            {
                "start": start,
                "stop": start + len(words),
                "reward": float(turn),
                "stop_reason": "stop",
                "min_version": 1,
                "max_version": 2,
                "mean_version": 1.5,
                "running_s": 0.25,
            }
        )
    numbers = np.float32(random.normal(size=(3, len(texts))))
    logprobs = [float(-abs(one)) if is_trained else None for one, is_trained in zip(numbers[0], trained, strict=True)]
    old = [one and float(np.float32(one + 0.01 * float(gap))) for one, gap in zip(logprobs, numbers[1], strict=True)]
    advantages = [float(one) if is_trained else None for one, is_trained in zip(numbers[2], trained, strict=True)]
    table = {
        "ids": [1000 + index for index in range(len(texts))],
        "texts": texts,
        "prompt": len(prompt),
        "trained": trained,
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantages,
    }
    return table, turns


def _words(text: str) -> list[str]:
    """With the white space before them."""
    words, word = [], ""
    for character in text:
        if character.isspace() and word.strip():
            words, word = [*words, word], ""
        word += character
    return [*words, word]
