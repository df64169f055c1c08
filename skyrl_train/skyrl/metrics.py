"""SkyRL's functions over outputs of generators: their metrics, and outputs put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from skyrl_train.clock import now
from skyrl_train.skyrl.interface import GeneratorOutput, MetricsOutput


class Timer:
    """Adds the seconds of a `with` block to `update_dict[message]`, for example to `all_timings` of the trainer."""

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
    """The reward of a response, given for it or for each of its tokens."""
    return float(sum(reward)) if isinstance(reward, list | tuple) else float(reward)  # type: ignore[arg-type]


def get_metrics_from_generator_output(generator_output: GeneratorOutput, uids: Sequence[str]) -> MetricsOutput:
    """Mean reward, share of prompts with a positive one, and mean of the positive parts. Raises ValueError if empty.

    Of rewards by token, a sample passes by the one on its last token, as in SkyRL.
    """
    rewards = generator_output["rewards"]
    if not rewards:
        raise ValueError("rewards: there are none.")
    best: dict[str, float] = defaultdict(lambda: float("-inf"))
    positive = []
    for uid, reward in zip(uids, rewards, strict=True):
        tokens = list(reward) if isinstance(reward, list | tuple) else [float(reward)]  # type: ignore[arg-type]
        best[uid] = max(best[uid], tokens[-1])
        positive.append(sum(max(one, 0.0) for one in tokens))
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
    """generate/*: lengths of responses, and of those with and without a reward; environment/*: means of its numbers."""
    lengths = [len(response) for response in responses]
    totals = [sum_rewards(reward) for reward in rewards]
    found = {
        "generate/min_num_tokens": float(min(lengths)),
        "generate/max_num_tokens": float(max(lengths)),
        "generate/avg_num_tokens": fmean(lengths),
        "generate/std_num_tokens": pstdev(lengths),
        "generate/avg_tokens_non_zero_rewards": _mean([n for n, one in zip(lengths, totals, strict=True) if one > 0]),
        "generate/avg_tokens_zero_rewards": _mean([n for n, one in zip(lengths, totals, strict=True) if one == 0]),
    }
    numbers: dict[str, list[float]] = defaultdict(list)
    for metrics in env_metrics or () if env_classes is not None else ():
        for name, value in metrics.items():
            if isinstance(value, int | float):
                numbers[name].append(float(value))
    return found | {f"environment/{name}": fmean(values) for name, values in numbers.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def concatenate_generator_outputs(generator_outputs: Sequence[GeneratorOutput]) -> GeneratorOutput:
    """One output after the other. Raises ValueError if only some of them tell log-probs."""
    first = generator_outputs[0]
    if len({one.get("rollout_logprobs") is None for one in generator_outputs}) > 1:
        raise ValueError("rollout_logprobs: some outputs have them and others do not.")
    joined: dict[str, Any] = dict.fromkeys(("stop_reasons", "rollout_logprobs", "trajectory_ids", "is_last_step"))
    for name, value in first.items():
        if isinstance(value, list):
            joined[name] = [item for one in generator_outputs for item in one[name]]  # type: ignore[literal-required]
    joined["rollout_metrics"] = get_rollout_metrics(joined["response_ids"], joined["rewards"])
    return joined  # type: ignore[return-value]


def apply_overlong_filtering(
    loss_masks: Sequence[Sequence[int]], response_ids: Sequence[Sequence[int]], eos_token_id: int
) -> list[list[int]]:
    """Masks of zeros for responses that do not end with the end-of-sequence token (DAPO, arXiv:2503.14476)."""
    ended = [bool(response) and response[-1] == eos_token_id for response in response_ids]
    return [list(mask) if whole else [0] * len(mask) for mask, whole in zip(loss_masks, ended, strict=True)]
