"""A collector in an actor delivers complete batches, gets complete weights and ends cleanly."""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.errors import WeightSyncError
from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector
from skyrl_train.tensordict.envs.gsm8k import GSM8KEnv
from skyrl_train.tensordict.losses.mc_advantage import RayMCAdvantage
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.tensordict_batches import replay_buffer

ROWS = [{"question": "1 + 1 = ?", "answer": "#### 2"}]
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[None]:
    with Cluster():
        yield


def collector(model: str, **settings: Any) -> RayLLMCollector:
    """Return a collector of one-turn conversations, two at a time."""
    given: dict[str, Any] = {"dialog_turns_per_batch": 2, "track_policy_version": True, "timeout": DEADLINE_S}
    given["env"] = partial(GSM8KEnv, dataset=ROWS, num_envs=2, system_prompt=None)
    return RayLLMCollector(
        policy_factory=partial(TransformersWrapper, model, generate_kwargs={"max_new_tokens": 4}),
        **{**given, **settings},
    )


def gap(row: TensorDictBase, model: torch.nn.Module) -> float:
    """Return the largest difference in nats between a sampled turn's log-probs and the model's."""
    wrapper = TransformersWrapper(model, tokenizer=byte_tokenizer(), input_mode="tokens", generate=False, inplace=False)
    theirs = wrapper(row.select("tokens", "masks"))["log_probs"].full.detach()[len(row["tokens"].prompt) :]
    return float((row["log_probs"].response - theirs).abs().max())


@pytest.mark.defect("D34")
@pytest.mark.timeout(600)
def test_batch_ahead_is_one_update_old_at_most(ray_runtime: None, tiny_model_path: str, tmp_path: Path):
    def noting() -> GSM8KEnv:
        """Return an environment that creates a file for every step."""
        from torchrl.envs import Transform

        class Notes(Transform):  # type: ignore[misc]
            def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
                (tmp_path / str(len(list(tmp_path.iterdir())))).touch()
                return next_tensordict

        made = GSM8KEnv(dataset=[{"question": "1 + 1 = ?", "answer": "#### 2"}], num_envs=2, system_prompt=None)
        return made.append_transform(Notes())

    settings: dict[str, Any] = {
        "env": noting,
        "sync_iter": False,
        "remote_config": None,
        "num_gpus": 0,
        "num_cpus": 0.5,
        "total_dialog_turns": 6,
    }
    with collector(tiny_model_path, **settings) as collects:
        assert collects.policy_version == 0
        ages = []
        for trained, batch in enumerate(collects):
            assert batch is not None and batch.batch_size == (2, 1)
            ages += [trained - int(row["policy_version"]) for row in batch[:, 0].unbind(0)]
            steps = min(trained + 2, 3)  # the next batch is sampled while this one is trained on
            _until(lambda steps=steps: len(list(tmp_path.iterdir())) == steps)
            weights = tiny_model(seed=trained + 1)
            collects.update_policy_weights_(weights)
            assert collects.get_policy_version() == trained + 1
        assert ages == [0, 0, 1, 1, 1, 1]
        assert list(collects) == []
        with pytest.raises(WeightSyncError, match=r"the engine has .*, but the trainer does not send it"):
            collects.update_policy_weights_({"model.norm.weight": torch.ones(64)})
        assert collects.policy_version == 3
    collects.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        _ = collects.policy_version


@pytest.mark.defect("D34")
@pytest.mark.timeout(600)
def test_batches_arrive_in_the_local_buffer(ray_runtime: None, tiny_model_path: str):
    buffer = replay_buffer(64, shuffle=False)
    with collector(tiny_model_path, replay_buffer=buffer, max_staleness=1) as collects:
        batches = iter(collects)
        assert next(batches) is None
        collects.update_policy_weights_(trained := tiny_model(seed=1))
        buffer.empty()
        assert next(batches) is None
        row = buffer.sample(2)[1]
        assert int(row["policy_version"]) == 1
        assert gap(row, trained) < 1e-4
        collects.start()
        _until(lambda: len(buffer) >= 6)
        ray.get(ray.remote(RayLLMCollector.increment_version).remote(collects), timeout=DEADLINE_S)
        _until(lambda: len(buffer) >= 8)
    assert not collects.is_running()
    assert len(buffer) == 8  # two batches ahead, and one more for the update


@pytest.mark.timeout(300)
def test_writers_complete_groups_in_one_actor(ray_runtime: None):
    def trajectory(reward: float) -> TensorDictBase:
        ends = {"reward": torch.tensor([[reward]]), "done": torch.tensor([[True]])}
        return lazy_stack([TensorDict({"query": "q", "next": ends, "policy_version": torch.tensor(3)})])

    made = partial(RayMCAdvantage, 2, actor_name="groups", max_staleness=0)
    first, second = made(), made()
    assert first.inv(trajectory(0.0)) is None and second.queued_trajectories == 1
    group = second.inv(trajectory(1.0))
    assert [round(float(row["advantage"]), 4) for row in group.unbind(0)] == [-0.7071, 0.7071]
    assert first.queued_trajectories == 0
    with pytest.raises(ValueError, match="grpo_size=0"):
        RayMCAdvantage(0)


def _until(true: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_unpicklable_arguments_are_rejected(ray_runtime: None):
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"env \(function\) cannot be pickled for the actor"):
        RayLLMCollector(lambda: lock, policy_factory=lambda: lock, dialog_turns_per_batch=1)  # type: ignore[arg-type, return-value]

    class Policy:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, tensordict: TensorDictBase) -> None:
            pass

    with pytest.raises(ValueError, match=r"policy \(Policy\) cannot be pickled .*Give policy_factory"):
        RayLLMCollector(partial(GSM8KEnv, dataset=ROWS), policy=Policy(), dialog_turns_per_batch=1)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"env": GSM8KEnv(dataset=ROWS)}, ValueError, "makes its environment in the actor"),
        ({"policy": lambda td: td}, ValueError, "exactly one of policy and policy_factory"),
        ({"dialog_turns_per_batch": None, "yield_completed_trajectories": True}, ValueError, "needs dialog_turns"),
        ({"sync_iter": False, "max_staleness": 0}, ValueError, "max_staleness must be at least 1"),
        ({"frames_per_batch": 1}, TypeError, "frames_per_batch"),
        ({"replay_buffer": replay_buffer(1), "queue": queues.Queue()}, RuntimeError, "Give only one of them"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], error: type[Exception], says: str):
    given: dict[str, Any] = {
        "env": lambda: None,
        "policy_factory": lambda: None,
        "dialog_turns_per_batch": 1,
        **settings,
    }
    with pytest.raises(error, match=says):
        RayLLMCollector(**given)
