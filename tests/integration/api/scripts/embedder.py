"""A program with an event loop of its own, and parts of its own of every kind. Run: embedder.py ROWS MODEL FOLDER"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import skyrl_train as sk
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.errors import RunInterrupted

ROWS, MODEL, FOLDER = sys.argv[1:4]
SEEN: dict[str, list[Any]] = {"tracked": [], "prompts": [], "estimated": []}


@sk.register.reward("brief")
def brief(response: str, *, ground_truth: str, prompt: list[dict[str, Any]], extras: dict[str, Any]) -> float:
    """1 minus the share of vowels; the row's answer counts extra."""
    assert prompt[-1]["role"] == "user" and extras["reward_spec"]["ground_truth"] == ground_truth
    return 1 - sum(letter in "aeiou" for letter in response) / max(len(response), 1) + (ground_truth in response)


def is_short(response: str) -> bool:
    return len(response) < 20


sk.register.rewards("graded", [brief, is_short], weights=[1.0, 0.5])


@sk.register.tool("clock")
class Clock(sk.Tool):
    name = "clock"
    description = "The time."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    async def call(self, arguments: dict[str, Any]) -> str:
        raise sk.ToolError("the clock stands still")


@sk.register.agent("caller")
async def caller(session: sk.AgentSession, row: dict[str, Any]) -> float:
    return float(session.base_url.endswith("/v1"))


async def listing(sandbox: sk.AgentSandbox) -> sk.CommandResult:
    """The files of an agent, as a sandbox of one's own would show them."""
    return await sandbox.exec(["ls"], env={}, timeout_s=5.0, max_output_bytes=1024)


@sk.register.environment("two_turns")
class TwoTurns(sk.BaseTextEnv):
    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if "refuse" in self.env_config:
            raise sk.EnvironmentFailure("refused")
        self.parameters = len(sk.make_tool("clock").parameters)
        self.tools = sk.ToolBox([sk.make_tool("clock")])
        results = [self.tools.run(call) for call in sk.parse_calls('{"name": "clock"}', "json")]
        assert [result.text for result in results] == ["the clock stands still"]
        return prompt, {}

    def close(self) -> None:
        self.tools.close()

    def step(self, action: str) -> sk.StepOutput:
        self.turns += 1
        said = [] if self.turns > 1 else [{"role": "user", "content": "again"}]
        metadata = {"parameters_of_clock": self.parameters}
        reward = float(len(action) % 3)
        return sk.StepOutput(observations=said, reward=reward, done=self.turns > 1, metadata=metadata)


@sk.register.advantage("centred")
def centred(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    SEEN["estimated"].append(len(rewards))
    return torch.where(valid, rewards - rewards[valid].mean(), 0.0)


@sk.register.policy_loss("reinforce")
def reinforce(
    logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return -logprobs * advantages * mask, torch.zeros_like(mask)


@sk.register.kl_estimator("squared")
def squared(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (logprobs - ref_logprobs).square() * mask


@sk.register.reduction("sum_of_tokens")
def sum_of_tokens(mask: torch.Tensor, sequence_ids: torch.Tensor, group_ids: torch.Tensor, *, max_seq_len: int) -> Any:
    return mask / max_seq_len


@sk.register.sft_loss("nll")
def nll(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -logprobs * mask


@sk.register.tracker("memory")
class InMemory(sk.Tracker):
    def __init__(self, setup: sk.TrackerSetup):
        assert setup.run_dir.is_dir() and setup.config["trainer"]["max_steps"] == 2
        self.is_first_attempt = not (setup.run_dir / "global_step_1").exists()

    def begin(self, step: int, total_steps: int) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step == 0:  # before the first step: what the first publish measured
            return
        assert metrics["rollouts/failed"] == 0 and metrics["environment/parameters_of_clock"] == 2
        SEEN["tracked"].append((step, metrics["reward/mean"]))

        if self.is_first_attempt:
            os.kill(os.getpid(), signal.SIGTERM)

    def samples(self, rows: Sequence[Any], step: int) -> None: ...

    def close(self) -> None: ...


class Watched(sk.Experiment):
    """Looks at what flows."""

    def get_train_dataset(self) -> sk.PromptDataset:
        dataset = super().get_train_dataset()
        SEEN["prompts"] += dataset.prompts
        return dataset

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> Any:
        generator = super().build_generator(client, environments, evaluation=evaluation)
        rollout = generator.rollout

        async def watched(prompt: sk.Prompt, position: int) -> sk.TrajectoryGroup:
            group: sk.TrajectoryGroup = await rollout(prompt, position)
            assert all(isinstance(one, sk.Trajectory) for one in group.trajectories)
            return group

        generator.rollout = watched  # type: ignore[method-assign]
        return generator


def configuration(**more: Any) -> sk.Config:
    return sk.load_config(
        {
            "data.train_data": [ROWS],
            "data.val_data": [],
            "trainer.policy.model.path": MODEL,
            "trainer.ckpt_path": Path(FOLDER) / "run",
            "trainer.export_path": Path(FOLDER) / "exports",
            "trainer.train_batch_size": 4,
            "trainer.policy_mini_batch_size": 4,
            "trainer.max_tokens_per_microbatch": 2048,
            "trainer.max_steps": 2,
            "trainer.ckpt_interval": -1,
            "trainer.logger": ["memory"],
            "trainer.algorithm.advantage_estimator": "centred",
            "trainer.algorithm.policy_loss_type": "reinforce",
            "trainer.algorithm.loss_reduction": "sum_of_tokens",
            "trainer.algorithm.kl_estimator_type": "squared",
            "trainer.algorithm.sft.loss_type": "nll",
            "generator.n_samples_per_prompt": 2,
            "generator.max_turns": 2,
            "generator.sampling_params.max_generate_length": 8,
            "environment.env_class": "brief",
            "environment.skyrl_gym.tool_use.tools": ["clock"],
            **more,
        }
    )


async def drive(cfg: sk.Config) -> None:
    async with sk.session(cfg, Watched) as run:
        assert isinstance(run, sk.Session)
        request = sk.SampleRequest(
            "mine", to_token_array(run.tokenizer.encode("hello")), sk.SamplingParams(max_tokens=3), seed=1
        )
        async with run.generating():
            (before,) = await run.client.generate([request])
        assert isinstance(before, sk.Completion) and len(before.token_ids) <= 3
        await run.trainer.fit()
        assert run.trainer.step == 2 and (run.directory / "metrics.jsonl").is_file()


def refused(work: Callable[[], Any]) -> str:
    """The message of the ConfigError."""
    try:
        work()
    except sk.ConfigError as error:
        return str(error)
    raise AssertionError("it was accepted")


def told_to_end(cfg: sk.Config) -> int:
    """The signal that ended it."""
    try:
        sk.train(cfg)
    except RunInterrupted as stopped:
        return stopped.signal
    raise AssertionError("it went on")


def refusals() -> None:
    assert "trainer.max_steps" in refused(lambda: sk.load_config({"trainer.max_steps": 0}))
    assert "Did you mean trainer.max_steps?" in refused(lambda: sk.load_config(["trainer.max_stepz=1"]))
    assert "/no/such" in refused(lambda: sk.check(configuration(**{"trainer.policy.model.path": "/no/such/model"})))
    stops = (sk.CheckpointError, sk.DeadlineExceeded, sk.EngineError, sk.RolloutsFailed, sk.WeightSyncError)
    assert all(issubclass(stop, sk.SkyRLError) for stop in stops)


async def alone() -> None:
    async with sk.engine(MODEL) as engine:
        one: sk.InferenceEngine = engine
        assert (await one.health()).version == 0


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    refusals()
    assert told_to_end(configuration()) == signal.SIGTERM
    assert (Path(FOLDER) / "run" / "global_step_1" / "manifest.json").is_file()
    asyncio.run(drive(configuration()))  # resumes the run
    assert [step for step, *_ in SEEN["tracked"]] == [1, 2] and SEEN["estimated"] == [8, 8]
    result = sk.TrainingResult(Path(FOLDER) / "run", 2)
    assert [row["step"] for row in result.metrics() if row["step"]] == [1, 2]
    assert result.metrics()[-1]["rollouts/failed"] == 0
    assert {prompt.env_class for prompt in SEEN["prompts"]} == {"brief", "two_turns", "graded"}
    asyncio.run(alone())
    assert "'vllm'" in refused(lambda: asyncio.run(sk.engine(MODEL, backend="vlm").__aenter__()))
    print("everything held", flush=True)


if __name__ == "__main__":
    main()
    sk.run_experiment(Watched, ["trainer.ckpt_path=" + FOLDER + "/run", "--cfg=job"])  # as a command line would
