"""Conversion between GeneratorOutput and groups of trajectories, with checks of what SkyRL's generators return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import Tokens, append_array, mask_to_spans, to_logprob_array, to_token_array
from skyrl_train.data.trajectory import OK, Restart, Trajectory, TrajectoryGroup, Turn
from skyrl_train.errors import RolloutsFailed
from skyrl_train.skyrl.interface import GeneratorOutput, TrajectoryID

_PER_ENTRY = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")


class PostprocessedOutput(tuple[GeneratorOutput, list[str]]):
    """A pair (output, uids), as newer versions of SkyRL return it.

    A string index reads or sets a field of the output, for programs written for SkyRL 0.3.
    """

    def __getitem__(self, key: Any) -> Any:
        return self[0][key] if isinstance(key, str) else super().__getitem__(key)  # type: ignore[literal-required]

    def __setitem__(self, key: str, value: Any) -> None:
        self[0][key] = value  # type: ignore[literal-required]


def validate_entries(output: Mapping[str, Any], caller: str) -> None:
    """Check the fields of an output that have one value for each response token.

    Args:
        output: A GeneratorOutput.
        caller: The name of the function that returned it, for the error message.

    Raises:
        RolloutsFailed: A prompt or response is empty, a field has a wrong length, or a value is not finite.
    """
    problem = next(_entry_problems(output, len(output["response_ids"])), None)
    if problem is not None:
        raise RolloutsFailed(f"{caller} returned {problem}. Nothing was trained on it.")


def validate_output(output: Any, ids: Sequence[TrajectoryID], caller: str) -> None:
    """Check that an output belongs to the requested samples and that all its fields are valid.

    Args:
        output: The object that `generate` returned.
        ids: The requested samples, in the order of the input.
        caller: The name of the generator's class, for the error message.

    Raises:
        RolloutsFailed: A field is missing or has a wrong length, a value is not finite, or the number or order of
            samples differs. The message names field, entry and rule.
    """
    problem = next(_problems(output, ids), None)
    if problem is not None:
        raise RolloutsFailed(f"{caller}.generate returned {problem}. Nothing was trained on it.")


def _problems(output: Any, ids: Sequence[TrajectoryID]) -> Iterator[str]:
    if not isinstance(output, Mapping):
        yield f"{type(output).__name__}, not a GeneratorOutput (a dict)"
        return
    for name in _PER_ENTRY:
        if output.get(name) is None:
            yield f"no {name!r}; it must have {', '.join(_PER_ENTRY)}"
            return
    count = len(output["response_ids"])
    stepwise = output.get("is_last_step") is not None
    if not stepwise and count != len(ids):
        yield f"{count} response_ids for {len(ids)} samples; it must return one for each, in the order of the input"
        return
    optional = ("stop_reasons", "rollout_logprobs", "is_last_step", "trajectory_ids")
    for name in (*_PER_ENTRY, *optional):
        if output.get(name) is not None and len(output[name]) != count:
            yield f"{len(output[name])} {name} for {count} response_ids; both must have the same length"
            return
    yield from _entry_problems(output, count)
    if stepwise:
        yield from _step_problems(output, ids)


def _entry_problems(output: Mapping[str, Any], count: int) -> Iterator[str]:
    by_token = count > 0 and isinstance(output["rewards"][0], list | tuple)
    fields = ["loss_masks", *(["rewards"] if by_token else [])]
    fields += ["rollout_logprobs"] if output.get("rollout_logprobs") is not None else []
    for entry in range(count):
        length = len(output["response_ids"][entry])
        if not length or not len(output["prompt_token_ids"][entry]):
            yield f"entry {entry} with no token in its {'prompt' if length else 'response'}"
        for name in fields:
            value = output[name][entry]
            if not isinstance(value, list | tuple) or len(value) != length:
                actual = f"{len(value)}" if isinstance(value, list | tuple) else repr(value)
                yield f"{name}[{entry}] with {actual} instead of {length} values, one for each token of the response"
        logprobs = output["rollout_logprobs"][entry] if "rollout_logprobs" in fields else []
        if isinstance(logprobs, list | tuple) and not all(map(_is_finite, logprobs)):
            yield (
                f"rollout_logprobs[{entry}]={logprobs!r:.80}, which must be finite; use 0.0 for tokens that were not "
                "sampled"
            )
        reward = output["rewards"][entry]
        if not all(map(_is_finite, reward if by_token and isinstance(reward, list | tuple) else [reward])):
            yield f"rewards[{entry}]={reward!r:.80}, which must be finite, {'per token' if by_token else 'one number'}"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _step_problems(output: Mapping[str, Any], ids: Sequence[TrajectoryID]) -> Iterator[str]:
    if output.get("trajectory_ids") is None:
        yield "'is_last_step' without 'trajectory_ids', which tell to which sample a step belongs"
        return
    ended: list[str] = []
    open_id: str | None = None
    for entry, (trajectory_id, last) in enumerate(zip(output["trajectory_ids"], output["is_last_step"], strict=True)):
        name = trajectory_id.to_string()
        if open_id not in (None, name):
            yield f"trajectory_ids[{entry}]={name!r} before the last step of {open_id!r}; steps must be adjacent"
            return
        open_id = None if last else name
        if last:
            ended.append(name)
    expected = [requested.to_string() for requested in ids]
    if ended != expected or open_id is not None:
        yield f"the last steps of {len(ended)} episodes for {len(expected)} samples, or in another order than the input"


def to_trajectories(
    output: GeneratorOutput,
    prompts: Sequence[Prompt],
    ids: Sequence[TrajectoryID],
    *,
    temperature: float,
    versions: tuple[int, int],
) -> list[Trajectory]:
    """Convert an output that `validate_output` accepted to trajectories, one for each sample.

    Args:
        output: The output.
        prompts: The prompt of each sample.
        ids: The id of each sample.
        temperature: The temperature at which the samples were drawn.
        versions: The weight versions when generation began and when it ended.
    """
    lasts = output.get("is_last_step") or [True] * len(output["response_ids"])
    steps: list[int] = []
    trajectories: list[Trajectory] = []
    for entry, last in enumerate(lasts):
        steps.append(entry)
        if last:
            index = len(trajectories)
            sample = ids[index].repetition_id
            trajectories.append(_trajectory(output, steps, prompts[index], sample, temperature, versions))
            steps = []
    return trajectories


def _trajectory(
    output: GeneratorOutput,
    steps: Sequence[int],
    prompt: Prompt,
    sample: int,
    temperature: float,
    versions: tuple[int, int],
) -> Trajectory:
    """Build the trajectory of one sample from its entries; each step after the first is a sequence of its own."""
    logprobs = output.get("rollout_logprobs")
    item = Trajectory.empty(prompt, sample, temperature)
    item.prompt_ids = _copy_tokens(output["prompt_token_ids"][steps[0]])
    rewards = output["rewards"]
    for step in steps:
        if step != steps[0]:
            item.restarts.append(Restart(len(item.response_ids), _copy_tokens(output["prompt_token_ids"][step])))
        start = len(item.response_ids)
        item.response_ids = append_array(item.response_ids, _copy_tokens(output["response_ids"][step]))
        item.loss_spans += [(start + begin, start + end) for begin, end in mask_to_spans(output["loss_masks"][step])]
        if logprobs is not None:
            item.logprobs = append_array(item.logprobs, to_logprob_array(logprobs[step]))
        reward = _total(rewards[step]) if step == steps[-1] else 0.0
        reasons = output.get("stop_reasons")
        item.stop_reason = "stop" if reasons is None else str(reasons[step])
        stop = len(item.response_ids)
        sampled = sum(map(bool, output["loss_masks"][step]))
        observed = stop - start - sampled if sampled else 0  # an all-zero mask marks a failed episode
        mean = sum(versions) / 2
        item.turns.append(Turn(start, stop, reward, item.stop_reason, *versions, mean, observation_tokens=observed))
        item.reward = reward
    last = rewards[steps[-1]]
    if isinstance(last, list | tuple):
        item.token_rewards = [0.0] * (len(item.response_ids) - len(last)) + list(map(float, last))
    return item


def _copy_tokens(ids: Sequence[int]) -> Tokens:
    """Copy the ids, because a generator may reuse its buffers."""
    return np.array(ids, np.int32)


def _total(reward: Any) -> float:
    return math.fsum(reward) if isinstance(reward, list | tuple) else float(reward)


def to_generator_output(
    groups: Sequence[TrajectoryGroup], placeholder_token_id: int
) -> tuple[GeneratorOutput, list[str]]:
    """Convert groups to SkyRL's output.

    Entries are the rows that `collate` makes. Rewards are numbers if every sample has at most one turn and no token
    rewards, and lists with one number per token otherwise. Failed samples have loss masks of zeros.

    Args:
        groups: The groups.
        placeholder_token_id: The masked token that stands for the response of a sample without tokens.

    Returns:
        The output, and the prompt's uid of each of its entries.
    """
    items = [_with_placeholder_token(item, placeholder_token_id) for group in groups for item in group.trajectories]
    simple = all(item.token_rewards is None and len(item.turns) <= 1 and not item.restarts for item in items)
    output: dict[str, Any] = {name: [] for name in (*_PER_ENTRY, "stop_reasons", "rollout_logprobs", "trajectory_ids")}
    uids: list[str] = []
    lasts: list[bool] = []
    for item in items:
        rewards, mask = to_token_rewards(item), item.loss_mask
        sequences = list(item.sequences())
        for number, (prompt_ids, start, stop) in enumerate(sequences, 1):
            output["prompt_token_ids"].append(prompt_ids.tolist())
            output["response_ids"].append(item.response_ids[start:stop].tolist())
            output["loss_masks"].append((mask[start:stop] * (item.status == OK)).astype(int).tolist())
            output["rewards"].append(item.reward if simple else rewards[start:stop])
            output["stop_reasons"].append(item.stop_reason)
            output["rollout_logprobs"].append(item.logprobs[start:stop].tolist())
            output["trajectory_ids"].append(TrajectoryID(item.prompt.uid, item.sample))
            uids.append(item.prompt.uid)
            lasts.append(number == len(sequences))
    if not all(output["rollout_logprobs"]):  # some generator returned no log-probs
        output["rollout_logprobs"] = None
    output["is_last_step"] = lasts if not all(lasts) else None
    output["rollout_metrics"] = None
    return output, uids  # type: ignore[return-value]


def _with_placeholder_token(item: Trajectory, placeholder_token_id: int) -> Trajectory:
    if len(item.response_ids):
        return item
    placeholder = to_token_array([placeholder_token_id])
    prompt = item.prompt_ids if len(item.prompt_ids) else placeholder
    return replace(item, prompt_ids=prompt, response_ids=placeholder, loss_spans=[], logprobs=to_logprob_array([0.0]))


def to_token_rewards(item: Trajectory) -> list[float]:
    """Return the reward of each response token, [L].

    A turn's reward is on its last sampled token, unless the trajectory has token rewards. A failed trajectory, and one
    without a sampled token, has its reward on the last token.
    """
    from skyrl_train.data.batch import token_rewards

    if item.status == OK and item.loss_spans:
        return token_rewards(item)
    return [0.0] * (len(item.response_ids) - 1) + [item.reward]  # a failed one has reward 0


def update_trajectories(groups: Sequence[TrajectoryGroup], output: GeneratorOutput) -> None:
    """Set the rewards and loss masks of samples to those of an output that a program has changed. Changes in place.

    Failed samples and samples without tokens stay as they are.

    Args:
        groups: The groups from which `to_generator_output` made the output.
        output: The changed output, with the same entries.
    """
    entry = 0
    for item in (item for group in groups for item in group.trajectories):
        masks: list[int] = []
        rewards: list[float] = []
        sequences = list(item.sequences())
        for number, (_, start, stop) in enumerate(sequences, 1):
            entry_rewards = output["rewards"][entry]
            if not isinstance(entry_rewards, list | tuple):  # the reward of the last step is the episode's
                entry_rewards = [0.0] * (stop - start - 1) + [entry_rewards if number == len(sequences) else 0.0]
            masks += [int(bool(value)) for value in output["loss_masks"][entry]]
            rewards += map(float, entry_rewards)
            entry += 1
        if item.status == OK and len(item.response_ids):
            if rewards != to_token_rewards(item):
                item.raw_reward = item.outcome
                item.reward, item.token_rewards = math.fsum(rewards), rewards
            item.loss_spans = mask_to_spans(masks)
