"""Synthetic rollouts in any number, for tests of code that reads a run's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from skyrl_train.report.rollout_files import COLUMNS, write_rollouts, write_vocabulary

_CALLS = json.dumps([{"name": "python", "arguments": json.dumps({"code": "print(6 * 7)"}), "error": "timeout"}])
_SOURCES = ("gsm8k", "math", "tools")


def synthetic_vocabulary(size: int = 4096) -> list[str]:
    """Return the text of each token id: words of one to three syllables with a leading space.

    Token 0 ends a response.

    Args:
        size: Number of tokens.
    """
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = [*syllables, *(first + second for first in syllables for second in syllables)]
    words += [word + end for word in words for end in syllables[: 1 + size // len(words)]]
    return ["<end>", *(f" {word}" for word in words[: size - 1])]


def synthetic_rollouts(
    num_rollouts: int,
    step: int = 1,
    *,
    samples_per_prompt: int = 8,
    mean_tokens: int = 200,
    adversarial_texts: Sequence[str] = (),
) -> pa.Table:
    """Return rollouts of one step, with all columns of `rollout_files.COLUMNS` except "trained".

    The same arguments return the same rollouts. Every 50th rollout has failed. Every 10th has two turns with a tool
    response between them, which is not trained on.

    Args:
        num_rollouts: Number of rollouts.
        step: The training step.
        samples_per_prompt: Number of rollouts of each prompt.
        mean_tokens: Mean number of tokens of a response. The longest response has about twice as many.
        adversarial_texts: Texts that are inserted into evenly spaced responses, without matching token ids.
    """
    random = np.random.default_rng([step, num_rollouts])
    vocabulary = synthetic_vocabulary()
    lengths = random.integers(4, max(5, 2 * mean_tokens), num_rollouts)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = (random.zipf(1.3, offsets[-1]) % (len(vocabulary) - 1) + 1).astype(np.int32)
    ids[offsets[1:] - 1] = 0
    texts = _texts(ids, offsets, vocabulary)
    for index, text in enumerate(adversarial_texts):
        row = index * num_rollouts // max(1, len(adversarial_texts))
        texts[row] = f"{texts[row][:40]} {text}"
    logprobs = -random.exponential(0.5, len(ids)).astype(np.float32)
    old = logprobs + random.normal(0, 0.01, len(ids)).astype(np.float32)
    rewards = random.integers(0, 5, num_rollouts) / 4
    rows = [_row(step, index, samples_per_prompt, int(length), float(rewards[index]), texts[index], random)
            for index, length in enumerate(lengths)]  # fmt: skip
    table = pa.Table.from_pylist(rows, pa.schema([field for field in COLUMNS if field.name in rows[0]]))
    sampled = np.ones(len(ids), bool)
    for rollout, start in zip(rows, offsets.tolist(), strict=False):
        sampled[start : start + rollout["response_tokens"]] = False
        for span in rollout["loss_spans"]:
            sampled[start + span["start"] : start + span["stop"]] = True
    advantages = np.repeat((rewards - rewards.mean()).astype(np.float32), lengths) * sampled
    token_rewards = np.zeros(len(ids), np.float32)
    token_rewards[offsets[1:] - 1] = rewards
    per_token = {"rollout_logprobs": logprobs * sampled, "old_logprobs": old * sampled, "advantages": advantages}
    columns = {"response_ids": ids, **per_token, "token_rewards": token_rewards}
    for name, values in columns.items():
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
        table = table.append_column(name, lists.cast(COLUMNS.field(name).type))
    return table


def synthetic_run(run_folder: Path, num_steps: int, rollouts_per_step: int, **arguments: Any) -> None:
    """Write the vocabulary and the synthetic rollouts of some steps to a run folder.

    Args:
        run_folder: The run folder.
        num_steps: Number of steps, from 1 on.
        rollouts_per_step: Number of rollouts of each step.
        arguments: Further arguments of `synthetic_rollouts`.
    """
    write_vocabulary(run_folder, synthetic_vocabulary())
    for step in range(1, num_steps + 1):
        write_rollouts(run_folder, step, synthetic_rollouts(rollouts_per_step, step, **arguments))


def _texts(ids: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any], vocabulary: list[str]) -> list[str]:
    words = pa.array(vocabulary, pa.string()).take(pa.array(ids))
    lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), words)
    texts: list[str] = pc.binary_join(lists, "").to_pylist()
    return texts


def _row(
    step: int, index: int, samples: int, length: int, reward: float, text: str, random: np.random.Generator
) -> dict[str, Any]:
    group, sample = divmod(index, samples)
    failed, tool = index % 50 == 49, index % 10 == 9
    half = length // 2
    spans = [(0, half), (half + 1, length)] if tool else [(0, length)]
    reward = 0.0 if failed else reward
    question = f"{step} times {group} is what? Think first, then answer with the number alone."
    middle = len(text) // 2
    answers = [("assistant", text[:middle]), ("tool", "42"), ("assistant", text[middle:])] if tool else [
        ("assistant", text)
    ]  # fmt: skip
    messages = [{"role": "user", "content": question}]
    messages += [{"role": role, "content": content} for role, content in answers]
    stop_reason = "length" if index % 7 == 6 else "stop"
    versions = {"min_version": step - 1, "max_version": step - 1}
    return {
        "step": step,
        "uid": str((step * 1000 + group) % 7473),
        "group": group,
        "sample": sample,
        "data_source": _SOURCES[group % len(_SOURCES)],
        "env_class": "gsm8k",
        "reward": reward,
        "raw_reward": None,
        "turns": [
            {
                "start": start,
                "stop": stop,
                "reward": reward if stop == length else 0.0,
                "stop_reason": stop_reason if stop == length else "stop",
                **versions,
                "mean_version": float(step - 1),
                "running_s": 0.02 * (stop - start),
                "environment_s": 0.25,
                "tool_calls": _CALLS if stop < length else None,
                "observation_tokens": 0,
            }
            for start, stop in spans
        ],
        "status": "failed" if failed else "ok",
        "error": "timeout" if failed else None,
        "detail": "The environment did not answer in 10 s." if failed else "",
        "stop_reason": stop_reason,
        "temperature": 1.0,
        **versions,
        "env_metrics": json.dumps({} if failed else {"exact": reward}),
        "messages": json.dumps(messages),
        "text": text.encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
        "env_extras": json.dumps({"reward_spec": {"method": "rule", "ground_truth": str(step * group)}}),
        "prompt_tokens": 16,
        "response_tokens": length,
        "prompt_ids": [1 + (group + place) % 4000 for place in range(16)],
        **dict.fromkeys(
            ("loss_spans", "scored_spans"),
            [] if failed else [{"start": start, "stop": stop} for start, stop in spans],
        ),
        "restarts": [],
    }
