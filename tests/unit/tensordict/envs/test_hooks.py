"""Transforms written with TorchRL's hooks, and TorchRL's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.envs.base import StepCounter, TensorDictEnv, Transform
from skyrl_train.tensordict.envs.chat import ChatEnv


class Counting(TensorDictEnv):
    """Adds the action to "observation" [3]; the reward is 1."""

    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(3)})

    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        return TensorDict({"observation": root["observation"] + root["action"], "reward": torch.ones(1)})


def by(amount: float) -> Any:
    return lambda root: root.set("action", torch.full((2, 1), amount))


def played(transform: Any, steps: int = 2, action: float = 1.0) -> TensorDictBase:
    env = Counting(2).append_transform(transform)
    return env.rollout(steps, by(action), break_when_any_done=False)


class Calls(Transform):
    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("doubled", next_tensordict["observation"] * 2)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)


class Steps(Transform):
    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        assert self.parent is not None and self.parent.base_env.batch_size == (2,)
        moved = next_tensordict["observation"] - tensordict["observation"]
        return next_tensordict.set("reward", moved.sum(-1, keepdim=True))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset.set("observation", torch.ones(2, 3))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", tensordict["action"] * 10)


class Applies(Transform):
    def _apply_transform(self, obs: Any) -> Any:
        return obs + 5

    def _inv_apply_transform(self, state: Any) -> Any:
        return -state


@pytest.mark.defect("transform-hooks-not-called")
def test_the_hooks_of_a_transform_are_called():
    assert played(Calls())["next", "doubled"][0, :, 0].tolist() == [2, 4]
    assert played(Calls())["doubled"][0, :, 0].tolist() == [0, 2]
    stepped = played(Steps())
    assert stepped["action"].flatten().tolist() == [1] * 4
    assert stepped["observation"][0, :, 0].tolist() == [1, 11]
    assert stepped["next", "reward"].flatten().tolist() == [30] * 4


@pytest.mark.defect("transform-hooks-not-called")
def test_keys_are_transformed_one_by_one_and_missing_ones_are_errors():
    changed = played(Applies(in_keys=["observation"], out_keys=["shifted"], in_keys_inv=["action"]))
    assert changed["next", "shifted"][0, :, 0].tolist() == [4, 3]
    assert changed["action"].flatten().tolist() == [1] * 4  # what the policy did is what is stored
    assert played(Applies(["reward"]))["next", "reward"].flatten().tolist() == [6] * 4
    with pytest.raises(KeyError, match="'missing' is missing"):
        played(Applies(["missing"]))


@pytest.mark.defect("transform-hooks-not-called")
def test_a_function_is_a_transform_of_every_observation():
    seen = played(lambda root: root.set("seen", root["observation"] + 1))
    assert seen["seen"][0, :, 0].tolist() == [1, 2]
    assert seen["next", "seen"][0, :, 0].tolist() == [2, 3]


class AfterStep(Transform):
    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_


class AsksForSpecs(Transform):
    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._zeros(tensordict_reset)

    def _zeros(self, root: TensorDictBase) -> TensorDictBase:
        parent: Any = self.parent
        return root.update(parent.observation_spec.zero())


class Skips(Transform):
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("_step", torch.ones(2, dtype=torch.bool))


@pytest.mark.defect("transform-hooks-not-called")
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (AfterStep(), "_post_step_mdp_hooks"),
        (AsksForSpecs(), "observation_spec.*StepCounter"),
        (torch.nn.Identity(), "append_transform got"),
        (StepCounter, "append_transform got"),
        (3, "append_transform got"),
    ],
)
def test_what_would_do_nothing_is_refused_when_it_is_attached(transform: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Counting(2).append_transform(transform)


def test_steps_cannot_be_skipped():
    with pytest.raises(ConfigError, match="_step"):
        played(Skips())


def test_a_transform_outside_an_environment_does_something_or_says_so():
    data = TensorDict(observation=torch.zeros(2, 3), batch_size=(2,))
    assert Applies(["observation"])(data)["observation"][0, 0] == 5
    assert Calls().forward(data)["doubled"][0, 0] == 10
    with pytest.raises(NotImplementedError, match="only works in an environment"):
        StepCounter().forward(data)


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_transforms_of_torchrl_run_here(torchrl: Any):
    made = torchrl.envs.transforms
    with quietly():
        both = made.Compose(made.RewardScaling(loc=1.0, scale=2.0), made.RewardClipping(0, 2.5))
        assert played(both)["next", "reward"].flatten().tolist() == [2.5] * 4

        class Doubles(made.Transform):  # type: ignore[misc, name-defined]
            def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
                assert self.parent.batch_size == (2,)
                return next_tensordict.set("reward", next_tensordict["reward"] * 2)

        doubles = Doubles()
        assert played(doubles)["next", "reward"].flatten().tolist() == [2] * 4
        with pytest.raises(RuntimeError, match="already belongs to an environment"):
            Counting(2).append_transform(doubles)
        shifted = made.UnaryTransform(in_keys=["observation"], out_keys=["shifted"], fn=lambda value: value + 5)
        assert played(shifted)["shifted"][0, :, 0].tolist() == [5, 6]
        assert "policy_version" in played(torchrl.envs.llm.transforms.PolicyVersion()).keys()  # noqa: SIM118 - a tensordict


@pytest.mark.parametrize("name", ["StepCounter", "RewardSum", "InitTracker", "TrajCounter"])
def test_transforms_of_torchrl_that_need_specs_are_refused(torchrl: Any, name: str):
    with quietly(), pytest.raises(ConfigError, match=f"{name}.*environments of skyrl_train.tensordict"):
        ChatEnv().append_transform(getattr(torchrl.envs.transforms, name)())


def test_transforms_of_torchrl_may_add_to_conversations(torchrl: Any):
    with quietly():
        env = ChatEnv().append_transform(torchrl.envs.llm.transforms.AddThinkingPrompt(cond=lambda _: True))
        root = env.reset(TensorDict(query=["What?"], batch_size=[1]))
        root["text_response"] = ["<think>a</think><answer>2</answer>"]
        messages = env.step(root)["next"][0]["history"].prompt.to_chats()
    assert [message["role"] for message in messages][:2] == ["user", "assistant"]
    assert "2" not in messages[-1]["content"]  # the answer is withdrawn, and thinking goes on
