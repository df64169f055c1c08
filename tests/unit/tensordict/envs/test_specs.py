"""TorchRL's checks, transforms, batched environments and collectors, over every environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import (
    AsyncEnvPool,
    Compose,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TrajCounter,
    Transform,
    check_env_specs,
)
from torchrl.envs.llm import chat, datasets, reward

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.tensordict.envs.chat import ChatEnv, DatasetChatEnv
from skyrl_train.tensordict.envs.countdown import CountdownEnv, CountdownRewardParser
from skyrl_train.tensordict.envs.gsm8k import GSM8KEnv, GSM8KRewardParser
from skyrl_train.tensordict.envs.ifeval import IFEvalEnv, IfEvalScorer
from skyrl_train.tensordict.envs.llm_env import LLMHashingEnv, make_gsm8k_env
from skyrl_train.tensordict.envs.math import MATHEnv, MATHRewardParser
from skyrl_train.tensordict.envs.mlgym import MLGymWrapper
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
GSM8K = [{"question": f"{number}?", "answer": f"#### {number}"} for number in range(5)]
MATH = [{"problem": f"{number}?", "solution": rf"\boxed{{{number}}}"} for number in range(5)]
IFEVAL = [{"prompt": f"{n}?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for n in range(5)]


class Echo(TextEnv):
    def step(self, action: str) -> StepOutput:
        return StepOutput([{"role": "user", "content": action}], 1.0, done=False)


ENVIRONMENTS: dict[str, Callable[..., Any]] = {
    "gsm8k": lambda **settings: GSM8KEnv(dataset=GSM8K, num_envs=2, max_steps=2, **settings),
    "math": lambda **settings: MATHEnv(dataset=MATH, num_envs=2, **settings),
    "countdown": lambda **settings: CountdownEnv(num_envs=2, seed=0, **settings),
    "dataset": lambda **settings: DatasetChatEnv(dataset=GSM8K, data_key="question", num_envs=2, **settings),
    "ifeval": lambda: IFEvalEnv(dataset=IFEVAL, num_envs=2),
    "llm": lambda: make_gsm8k_env(GSM8K, num_envs=2, tokenizer=TOKENIZER),
    "mlgym": lambda: MLGymWrapper(Echo, batch_size=(2,), system_prompt="Repeat."),
    "tokenized": lambda: GSM8KEnv(dataset=GSM8K, num_envs=2, tokenizer=TOKENIZER, with_tokenizer=True),
}
MODES = [(name, mode) for name in ("gsm8k", "math", "dataset") for mode in ("history", "text", "tokens")]
CASES = [*MODES, ("countdown", "text"), *((name, "") for name in ("ifeval", "llm", "mlgym", "tokenized"))]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_specs_match_data_under_stacked_transforms(name: str, mode: str):
    env = ENVIRONMENTS[name](**({"input_mode": mode, "tokenizer": TOKENIZER} if mode else {}))
    check_env_specs(env, break_when_any_done="both")
    stacked = env.append_transform(Compose(StepCounter(3), InitTracker(), TrajCounter()))
    if name not in ("dataset", "mlgym"):
        stacked = stacked.append_transform(RewardSum())
    check_env_specs(stacked, break_when_any_done="both")
    played = stacked.rollout(5, break_when_any_done=False)
    assert played.batch_size == (2, 5)
    starts = {"gsm8k": [1, 2, 1, 2, 1], "dataset": [1, 2, 3, 1, 2], "mlgym": [1, 2, 3, 1, 2]}.get(name)
    if starts is not None and mode in ("history", ""):
        assert played["next", "step_count"][0].flatten().tolist() == starts


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_specs_of_plain_conversation_match(mode: str):
    env = ChatEnv(batch_size=(2,), input_mode=mode, tokenizer=TOKENIZER)
    check_env_specs(env, tensordict=env.reset(TensorDict(query=["a", "b"], batch_size=[2])))


def test_specs_of_hashes_match():
    env = LLMHashingEnv(vocab_size=10)
    root = env.reset(TensorDict(observation=torch.zeros(2, 3, dtype=torch.int64), batch_size=[2]))
    assert env.rollout(3, tensordict=root, auto_reset=False)["hashing"].shape == (2, 3, 1)


class Counts(Transform):
    """Counts messages, and the letters of the answer."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        turns = [len(row["history"].prompt) for row in next_tensordict.unbind(0)]
        return next_tensordict.set("turns", torch.tensor(turns))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        letters = [len(row["history"].full[-1].content) for row in tensordict.unbind(0)]
        return self._call(next_tensordict).set("letters", torch.tensor(letters))


@pytest.mark.defect("transform-hooks-not-called")
def test_hooks_of_custom_transform_are_called():
    env = DatasetChatEnv(dataset=GSM8K, data_key="question", num_envs=2).append_transform(Counts())
    env.append_transform(lambda tensordict: tensordict.set("seen", tensordict["turns"] + 1))
    root = env.reset()
    assert root["turns"].tolist() == [1, 1]
    root["text_response"] = ["a", "bcd"]
    following = env.step(root)["next"]
    assert following["turns"].tolist() == [2, 2] and following["letters"].tolist() == [1, 3]
    assert following["seen"].tolist() == [3, 3]


def test_classes_are_subclasses_of_torchrl():
    pairs = [
        (ChatEnv, chat.ChatEnv),
        (DatasetChatEnv, chat.DatasetChatEnv),
        (GSM8KEnv, datasets.GSM8KEnv),
        (MATHEnv, datasets.MATHEnv),
        (CountdownEnv, datasets.CountdownEnv),
        (IFEvalEnv, datasets.IFEvalEnv),
        (GSM8KRewardParser, reward.GSM8KRewardParser),
        (MATHRewardParser, reward.MATHRewardParser),
        (CountdownRewardParser, reward.CountdownRewardParser),
        (IfEvalScorer, reward.IfEvalScorer),
    ]
    assert all(issubclass(ours, theirs) for ours, theirs in pairs)


def test_workers_of_batched_environments_have_rows_of_their_own():
    env = SerialEnv(2, [lambda seed=seed: GSM8KEnv(dataset=GSM8K, num_envs=2, seed=seed) for seed in (0, 1)])
    played = env.rollout(3, break_when_any_done=False)
    assert played.batch_size == (2, 2, 3) and played["next", "done"].all()
    questions = [[step["query"] for step in worker.unbind(1)] for worker in played.unbind(0)]
    assert questions[0] != questions[1]
    env.close()


def test_pool_of_environments_steps_asynchronously():
    pool = AsyncEnvPool(
        [lambda: GSM8KEnv(dataset=GSM8K, max_steps=2) for _ in range(2)], backend="threading", stack="lazy"
    )
    root, counts = pool.reset(), []
    for _ in range(3):
        pool.async_step_and_maybe_reset_send(pool.rand_action(root))
        stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
        counts.append(stepped["next", "step_count"].flatten().tolist())
    assert counts == [[1, 1], [2, 2], [1, 1]]
    pool.close()


@pytest.mark.filterwarnings("ignore:The env passed to LLMCollector:FutureWarning")
def test_collectors_of_torchrl_take_several_environments():
    engine = ScriptedEngine(lambda request: [*TOKENIZER("hm")["input_ids"], TOKENIZER.eos_token_id])
    makers = [lambda: GSM8KEnv(dataset=GSM8K, max_steps=2, tokenizer=TOKENIZER)] * 2
    pool = AsyncEnvPool(makers, backend="threading", stack="lazy")
    for env, settings in ((SerialEnv(2, makers), {}), (pool, {"yield_completed_trajectories": True})):
        policy = LLMWrapperBase(engine, tokenizer=TOKENIZER)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8, **settings)
        turns = [batch["next", "step_count"].flatten().tolist() for batch in collector]
        assert sum(map(len, turns)) == 8 and all(counts == [1, 2] * (len(counts) // 2) for counts in turns)
        collector.shutdown()
