"""ChatEnvs over text environments, including research tasks on a server (as in MLGym)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Composite, Unbounded

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv, validate_messages, validate_step_output
from skyrl_train.environments.fenced_blocks import find_fenced_blocks
from skyrl_train.environments.integrations.openenv import OpenEnvEnv
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.envs.conversation import full_messages, history_of, last_response, question_of
from skyrl_train.tensordict.envs.rows import reset_rows

WRONG_FORMAT = "Your answer must hold exactly one block of code between ``` and ```; nothing was run."


class MLGymWrapper(ChatEnv):
    """A ChatEnv that runs episodes of a TextEnv: observations become messages, rewards "reward" [B, 1].

    Args:
        env: A function that makes a new episode: `environments.make(...)`, an OpenEnv server's (`make_mlgym`) or your
            own object with `init`, `step` and `close`. Or such an object, for a batch of one row.
        reward_wrong_format: If given, the action is the single fenced block of the final answer
            (`reasoning.final_answer`); an answer without a block, or with several, gets this reward and is not passed
            to the environment. Otherwise, the action is the model's whole text with its reasoning.
        **settings: Arguments of ChatEnv.
    """

    def __init__(
        self,
        env: Callable[[], TextEnv] | TextEnv,
        *,
        reward_wrong_format: float | None = None,
        **settings: Any,
    ):
        super().__init__(**settings)
        single = hasattr(env, "step") and not isinstance(env, type)
        if single and self.batch_size[0] != 1:
            raise ValueError(
                f"batch_size={tuple(self.batch_size)} needs several environments. Give a function that makes them, not "
                "an object."
            )
        self._make = cast(Callable[[], TextEnv], (lambda: env) if single else env)
        self.reward_wrong_format = reward_wrong_format
        self._running: list[TextEnv | None] = [None] * self.batch_size[0]

    def _make_specs(self) -> None:
        super()._make_specs()
        size = self.batch_size
        self.full_state_spec = Composite(shape=size, device=self.device)  # no question is needed
        self.full_reward_spec = Composite(reward=Unbounded((*size, 1)), shape=size).to(self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        chosen = reset_rows(tensordict, self.batch_size[0])
        given = None if tensordict is None else tensordict.exclude("_reset", "next").unbind(0)
        rows = [self._begin(place, given and given[place]) if reset else None for place, reset in enumerate(chosen)]
        placeholder = next(row for row in rows if row is not None)  # `reset` discards it
        return self._by_row(TensorDictBase.copy, lazy_stack([placeholder if row is None else row for row in rows]))

    def _begin(self, place: int, given: TensorDictBase | None) -> TensorDictBase:
        self._end(place)
        question = None if given is None else question_of(given, self.data_key)
        asked = self.opening("" if question is None else question)
        episode = self._make()
        try:
            messages = validate_messages(episode.init(asked if question is not None else asked[:-1])[0])
        except BaseException:
            episode.close()
            raise
        self._running[place] = episode
        row = TensorDict({}, batch_size=[]) if given is None else given.copy()
        return row.set("history", self._container(history_of(messages)))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = [self._played(place, row) for place, row in enumerate(tensordict.unbind(0))]
        return self._by_row(TensorDictBase.copy, lazy_stack(rows))

    def _played(self, place: int, root: TensorDictBase) -> TensorDictBase:
        row = self._step_row(root)
        if row["done"]:  # the model had no room for an answer
            self._end(place)
            return row.set("reward", torch.tensor([0.0]))
        text = last_response(root, self.tokenizer, self.policy_role)
        if text is None:
            raise ValueError(
                "MLGymWrapper.step found no answer of the model at the end of the history. Append the policy's answer "
                "before the step."
            )
        episode = self._running[place]
        if episode is None:
            raise RuntimeError("This episode is over. Reset its row before the next step.")
        output = self._answered(episode, text)
        said = full_messages(root, self.policy_role) or []
        row.set("history", self._container(history_of([*said, *output.observations])))
        for key, value in (("reward", float(output.reward)), ("terminated", output.done), ("done", output.done)):
            row.set(key, torch.tensor([value]))
        if output.done:
            self._end(place)
        return row

    def _answered(self, episode: TextEnv, text: str) -> StepOutput:
        if self.reward_wrong_format is None:
            return validate_step_output(episode.step(text))
        blocks = [fence.body for fence in find_fenced_blocks(final_answer(text)) if fence.is_closed]
        if len(blocks) != 1:
            observation: Message = {"role": self.user_role, "content": WRONG_FORMAT}
            return StepOutput([observation], self.reward_wrong_format, done=False)
        return validate_step_output(episode.step(blocks[0].rstrip("\n")))

    def _end(self, place: int) -> None:
        episode, self._running[place] = self._running[place], None
        if episode is not None:
            episode.close()

    def close(self, **settings: Any) -> None:
        """End all episodes."""
        for place in range(len(self._running)):
            self._end(place)
        super().close(**settings)


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    base_url: str | None = None,
    settings: Mapping[str, Any] | None = None,
    num_envs: int = 1,
    **wrapper: Any,
) -> MLGymWrapper:
    """Make a ChatEnv of research tasks on an OpenEnv server: every reset starts `task`, or the next of `tasks`.

    The server gets `{"task": NAME}` with /reset, and the model's answers (or their single block of code, with
    `reward_wrong_format`) with /step. No part of MLGym or its containers runs in this process.

    Args:
        task: Name of the only task. Give either this or `tasks`.
        tasks: Names of tasks, which resets start in turn.
        base_url: The server's URL.
        settings: Further settings of `OpenEnvEnv`: timeout, token_variable, action_key, observation_key.
        num_envs: Number of episodes in the batch.
        **wrapper: Arguments of MLGymWrapper: `tokenizer`, `system_prompt`, `reward_wrong_format`, `device` ("cpu").

    Raises:
        ValueError: Both or none of `task` and `tasks` are given, or `tasks` is empty.
        ConfigError: The settings are invalid.
    """
    if (task is None) == (tasks is None):
        raise ValueError("make_mlgym needs exactly one of task and tasks. Give one of them.")
    names = [task] if task is not None else list(tasks or ())
    if not names:
        raise ValueError("tasks=[] must name at least one task.")
    chosen = {**(settings or {}), "base_url": base_url}
    OpenEnvEnv.check(chosen)
    turn = itertools.cycle(names)
    return MLGymWrapper(
        lambda: OpenEnvEnv(chosen, {"reset": {"task": next(turn)}}),
        batch_size=(num_envs,),
        **{"device": "cpu", **wrapper},
    )
