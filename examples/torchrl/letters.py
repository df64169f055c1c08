"""The task of these scripts: answer any question with lowercase letters only."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from skyrl_train.tensordict import ChatEnv

QUESTIONS = [{"query": [f"Question {number}?"]} for number in range(64)]


class LetterReward(Transform):
    """Ends each conversation after the first answer, and rewards the fraction of its characters that are letters."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        answers = [row["history"].full.content[-1] for row in tensordict.unbind(0)]
        rewards = [sum("a" <= one <= "z" for one in text) / max(len(text), 1) for text in answers]
        next_tensordict.set("reward", torch.tensor(rewards).reshape(-1, 1, 1))
        done = torch.ones(len(answers), 1, dtype=torch.bool)
        return next_tensordict.update({"done": done, "terminated": done.clone()})

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def make_env(tokenizer: object, rows: int, repeats: int) -> ChatEnv:
    """Return an environment of `rows` conversations, in which every question is asked `repeats` times."""
    env = ChatEnv.from_dataloader(
        QUESTIONS, batch_size=(rows,), repeats=repeats, tokenizer=tokenizer, input_mode="history"
    )
    return env.append_transform(LetterReward())
