"""SkyRL's functions over generator outputs: metrics, concatenation and overlong filtering."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from skyrl_train.clock import now
from skyrl_train.skyrl.interface import GeneratorOutput, MetricsOutput


class Timer:
    """A context manager that adds the seconds of its block to `update_dict[message]`, for example to `all_timings`."""

    def __init__(self, message: str, update_dict: dict[str, float] | None = None):
        self._message = message
        self._seconds = {} if update_dict is None else update_dict

    def __enter__(self) -> Timer:
        self._start = now()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds[self._message] = self._seconds.get(self._message, 0.0) + now() - self._start

    async def __aenter__(self) -> Timer:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)


def sum_rewards(reward: float | Sequence[float]) -> float:
    """Return the total reward of a response; `reward` is one number, or one for each of its tokens."""
    return float(sum(reward)) if isinstance(reward, list | tuple) else float(reward)  # type: ignore[arg-type]


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Return the mean reward, the fraction of prompts with a passing sample, and the mean sum of positive rewards.

    A sample passes if its reward is positive. Of token rewards, only that of the last token decides, as in SkyRL.

    Args:
        generator_output: The output.
        uids: The prompt's uid for each of its entries.

    Raises:
        ValueError: The output is empty, or `uids` has another length.
    """
    rewards = generator_output["rewards"]
    if not rewards:
        raise ValueError("generator_output['rewards']: must have at least one entry.")
    best: dict[str, float] = defaultdict(lambda: float("-inf"))
    positive = []
    for uid, reward in zip(uids, rewards, strict=True):
        tokens = list(reward) if isinstance(reward, list | tuple) else [float(reward)]  # type: ignore[arg-type]
        best[uid] = max(best[uid], tokens[-1])
        positive.append(sum(max(value, 0.0) for value in tokens))
    return MetricsOutput(
        avg_score=fmean(map(sum_rewards, rewards)),
        pass_at_n=fmean(value > 0 for value in best.values()),
        mean_positive_reward=fmean(positive),
    )


def get_rollout_metrics(
    responses: Sequence[Sequence[int]],
    rewards: Sequence[Any],
    env_metrics: Sequence[Mapping[str, Any]] | None = None,
    env_classes: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return metrics of rollouts by name.

    Args:
        responses: The token ids of each response.
        rewards: The reward of each response, as one number or one per token.
        env_metrics: The metrics of each response's environment. They are ignored without `env_classes`.
        env_classes: The environment of each response. None: `env_metrics` is ignored.

    Returns:
        `generate/*`: response lengths in tokens, over all responses and over those with reward above 0 and equal to 0.
        `environment/*`: the mean of each numeric environment metric.

    Raises:
        ValueError: There are no responses.
    """
    lengths = [len(response) for response in responses]
    totals = [sum_rewards(reward) for reward in rewards]
    length_metrics = {
        "generate/min_num_tokens": float(min(lengths)),
        "generate/max_num_tokens": float(max(lengths)),
        "generate/avg_num_tokens": fmean(lengths),
        "generate/std_num_tokens": pstdev(lengths),
        "generate/avg_tokens_non_zero_rewards": _mean(
            [n for n, total in zip(lengths, totals, strict=True) if total > 0]
        ),
        "generate/avg_tokens_zero_rewards": _mean([n for n, total in zip(lengths, totals, strict=True) if total == 0]),
    }
    numbers: dict[str, list[float]] = defaultdict(list)
    for metrics in env_metrics or () if env_classes is not None else ():
        for name, value in metrics.items():
            if isinstance(value, int | float):
                numbers[name].append(float(value))
    return length_metrics | {f"environment/{name}": fmean(values) for name, values in numbers.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def concatenate_generator_outputs(generator_outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """Concatenate outputs. Rollout metrics are computed anew, without those of environments.

    Raises:
        ValueError: Some outputs have log-probs and others do not.
    """
    first = generator_outputs[0]
    if len({output.get("rollout_logprobs") is None for output in generator_outputs}) > 1:
        raise ValueError(
            "rollout_logprobs: some outputs have them and others do not. Return them from all generators or from none."
        )
    joined: dict[str, Any] = dict.fromkeys(("stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step"))
    for name, value in first.items():
        if isinstance(value, list):
            joined[name] = [item for output in generator_outputs for item in output[name]]  # type: ignore[literal-required]
    joined["rollout_metrics"] = get_rollout_metrics(joined["response_ids"], joined["rewards"])
    return joined  # type: ignore[return-value]


def apply_overlong_filtering(
    loss_masks: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], eos_token_id: int
) -> list[list[int]]:
    """Return the loss masks with zeros for responses that do not end with the end-of-sequence token.

    This is the overlong filtering of DAPO (arXiv:2503.14476).

    Args:
        loss_masks: The loss mask of each response.
        response_ids: The token ids of each response.
        eos_token_id: The end-of-sequence token.
    """
    complete = [bool(response) and response[-1] == eos_token_id for response in response_ids]
    return [
        list(mask) if is_complete else [0] * len(mask) for mask, is_complete in zip(loss_masks, complete, strict=True)
    ]
