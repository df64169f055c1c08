"""SkyRL's generators as rollouts: batching of calls, seeds, errors and cancellation."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.schema import Config
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.errors import RolloutsFailed
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.client import InferenceEngineClient
from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator
from skyrl_train.skyrl.interface import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.skyrl.rollouts import GeneratorInterfaceRollouts, generate_settings
from skyrl_train.skyrl.trainer import RayPPOTrainer
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer
from tests.support.trajectories import completion_from

TOKENIZER = byte_tokenizer()
SYNCHRONOUS = ["generator.n_samples_per_prompt=2", "trainer.seed=7", "device=cpu"]
FULLY_ASYNC = [*SYNCHRONOUS, "trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]


class Engines:
    """Engines that answer with tokens derived from the seed and record their requests."""

    engines = ()

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []

    async def generate(self, requests: list[SampleRequest]) -> list[Completion]:
        self.requests += requests
        return [
            completion_from(request.request_id, [65 + request.seed % 20, 66], [-1.0, -1.0], [-1.0, -1.0], "stop", [])
            for request in requests
        ]


class FixedGenerator(GeneratorInterface):
    """A generator that returns fixed tokens, or samples from `client`, and records its inputs."""

    def __init__(self, client: Any = None, logprobs: bool = True):
        self.client = client
        self.inputs: list[GeneratorInput] = []
        self.logprobs = logprobs
        self.may_continue = asyncio.Event()
        self.may_continue.set()
        self.ended = False

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.inputs.append(input_batch)
        try:
            await self.may_continue.wait()
        finally:
            await asyncio.sleep(0.01)
            self.ended = True
        count = len(input_batch["prompts"])
        responses = [[70, 71]] * count
        if self.client is not None:
            request = {"prompt_token_ids": [[1]] * count, "sampling_params": input_batch["sampling_params"]}
            responses = (await self.client.generate(request))["response_ids"]
        return {
            "prompt_token_ids": [[1]] * count,
            "response_ids": responses,
            "rewards": [1.0] * count,
            "loss_masks": [[1, 1]] * count,
            "stop_reasons": None,
            "rollout_metrics": {"mine": float(count)},
            "rollout_logprobs": [[-1.0, -1.0]] * count if self.logprobs else None,
        }


def config(keys: list[str]) -> Config:
    return load_preset(keys)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(uid), [{"role": "user", "content": f"say {uid}"}], "mine") for uid in range(count)]


def rollouts(
    generator: Any,
    keys: list[str],
    *,
    evaluation: bool = False,
    step: int = 3,
    needs: bool = False,
    metrics: Metrics | None = None,
) -> Any:
    adapter = GeneratorInterfaceRollouts(
        generator, generate_settings(config(keys), evaluation=evaluation, needs_logprobs=needs), TOKENIZER
    )
    adapter.connect(SimpleNamespace(step=step, metrics=Metrics() if metrics is None else metrics))  # type: ignore[arg-type]
    return adapter


async def run_all(adapter: GeneratorInterfaceRollouts, count: int) -> list[TrajectoryGroup]:
    return list(
        await asyncio.gather(*(adapter.rollout(prompt, position) for position, prompt in enumerate(prompts(count))))
    )


def test_synchronous_step_is_one_generate_call():
    async def run() -> None:
        generator, metrics = FixedGenerator(), Metrics()
        adapter = rollouts(generator, SYNCHRONOUS, metrics=metrics)
        groups = await run_all(adapter, 3)
        (batch,) = generator.inputs
        assert [trajectory_id.to_string() for trajectory_id in batch["trajectory_ids"] or ()] == [
            "0_0",
            "0_1",
            "1_0",
            "1_1",
            "2_0",
            "2_1",
        ]
        assert batch["batch_metadata"] is not None and batch["batch_metadata"].global_step == 4
        assert [group.prompt.uid for group in groups] == ["0", "1", "2"]
        item = groups[1].trajectories[1]
        assert (item.sample, item.min_version, item.text) == (1, 3, TOKENIZER.decode([70, 71]))
        assert item.messages == [*groups[1].prompt.messages, {"role": "assistant", "content": item.text}]
        assert metrics.flush() == {"mine": 6.0}

    asyncio.run(run())


def test_fully_async_training_calls_generate_per_prompt():
    async def run() -> None:
        training, evaluation = FixedGenerator(), FixedGenerator()
        await asyncio.gather(
            run_all(rollouts(training, FULLY_ASYNC), 3), run_all(rollouts(evaluation, FULLY_ASYNC, evaluation=True), 3)
        )
        assert [len(batch["prompts"]) for batch in training.inputs] == [2, 2, 2]
        (batch,) = evaluation.inputs
        assert batch["batch_metadata"] is not None and batch["batch_metadata"].global_step == 3

    asyncio.run(run())


@pytest.mark.parametrize("keys", [SYNCHRONOUS, FULLY_ASYNC])
def test_seeds_do_not_depend_on_concurrent_requests(keys: list[str]):
    async def sampled(others: bool) -> list[list[int]]:
        engines = Engines()
        client = InferenceEngineClient(engines, TOKENIZER, config(keys))  # type: ignore[arg-type]
        training = run_all(rollouts(FixedGenerator(client), keys), 3)
        if others:  # an evaluation of the same uids at the same step, and a call outside any scope
            await run_all(rollouts(FixedGenerator(client), keys, evaluation=True), 3)
            await client.generate({"prompt_token_ids": [[9]]})
        groups = await training
        assert len({request.request_id for request in engines.requests}) == len(engines.requests)
        return [item.response_ids.tolist() for group in groups for item in group.trajectories]

    alone, concurrent = asyncio.run(sampled(False)), asyncio.run(sampled(True))
    assert alone == concurrent
    assert len({tuple(ids) for ids in alone}) > 1


@pytest.mark.parametrize("keys", [SYNCHRONOUS, FULLY_ASYNC])
def test_cancelled_rollouts_wait_for_generate(keys: list[str]):
    async def run() -> None:
        generator = FixedGenerator()
        generator.may_continue.clear()
        running = asyncio.ensure_future(run_all(rollouts(generator, keys), 2))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert generator.ended

    asyncio.run(run())


def test_trainer_generate_replaces_generator():
    class Around(RayPPOTrainer):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            output = await super().generate(input_batch)
            output["rewards"] = [7.0 for _ in output["rewards"]]
            return output

    cfg, generator = config(SYNCHRONOUS), FixedGenerator()
    trainer = Around(cfg, None, TOKENIZER, None, None, generator)
    settings = generate_settings(cfg, evaluation=False, needs_logprobs=False)
    assert RayPPOTrainer(cfg, None, TOKENIZER, None, None, generator).generate_override is None
    adapter = GeneratorInterfaceRollouts(generator, settings, TOKENIZER, trainer.generate_override)
    (group,) = asyncio.run(run_all(adapter, 1))
    assert {item.reward for item in group.trajectories} == {7.0}


def test_generator_error_fails_all_rollouts_of_call():
    class Broken(GeneratorInterface):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            raise KeyError("mine")

    async def run() -> list[Any]:
        adapter = rollouts(Broken(), SYNCHRONOUS)
        return list(
            await asyncio.gather(*(adapter.rollout(prompt, 0) for prompt in prompts(2)), return_exceptions=True)
        )

    assert [type(error) for error in asyncio.run(run())] == [KeyError, KeyError]


def test_missing_required_logprobs_raise_error():
    with pytest.raises(RolloutsFailed, match="no rollout_logprobs, which the configured"):
        asyncio.run(run_all(rollouts(FixedGenerator(logprobs=False), SYNCHRONOUS, needs=True), 1))
    (group,) = asyncio.run(run_all(rollouts(FixedGenerator(logprobs=False), SYNCHRONOUS), 1))
    assert group.trajectories[0].logprobs.tolist() == []


def test_client_accepts_parameters_of_both_engines():
    async def run() -> None:
        engines = Engines()
        client = InferenceEngineClient(engines, TOKENIZER, config(SYNCHRONOUS))  # type: ignore[arg-type]
        for params in ({"max_tokens": 5, "logprobs": 1}, {"max_new_tokens": 5, "no_stop_trim": True}):
            await client.generate({"prompts": [[{"role": "user", "content": "x"}]], "sampling_params": params})
        assert {request.sampling.max_tokens for request in engines.requests} == {5}
        body = {"messages": [{"role": "user", "content": "x"}], "session_id": "episode 1", "max_tokens": 4}
        answer = await client.chat_completion({"json": body, "headers": {}})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert engines.requests[-1].session.endswith("episode 1")
        error = await client.chat_completion({"json": body | {"tools": [{}]}})
        assert error["error"]["param"] == "tools[0].type"
        with pytest.raises(ValueError, match="either `prompts` or `prompt_token_ids`"):
            await client.generate({})
        with pytest.raises(AttributeError, match=r"no 'wake_up'\. Instead: remove the call"):
            await client.wake_up()

    asyncio.run(run())


def test_gym_generator_runs_only_requested_rows():
    adapter = SkyRLGymGenerator(config(SYNCHRONOUS).generator, None, None, TOKENIZER, "m")
    with pytest.raises(RuntimeError, match="get_generator of the experiment"):
        asyncio.run(adapter.generate({"prompts": []}))  # type: ignore[typeddict-item]


def test_text_begins_with_opened_reasoning():
    class Opening(FixedGenerator):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            output = await super().generate(input_batch)
            opening = TOKENIZER.encode("assistant\n<think>\n", add_special_tokens=False)
            return {**output, "prompt_token_ids": [opening] * len(output["response_ids"])}

    async def run() -> None:
        (group,) = await run_all(rollouts(Opening(), SYNCHRONOUS), 1)
        assert group.trajectories[0].messages[-1]["content"] == f"<think>\n{TOKENIZER.decode([70, 71])}"

    asyncio.run(run())


def test_completions_stop_at_end_of_turn_token():
    engines = Engines()
    client = InferenceEngineClient(engines, TOKENIZER, config(SYNCHRONOUS))  # type: ignore[arg-type]

    async def run() -> None:
        await client.generate({"prompt_token_ids": [[9]]})
        await client.generate({"prompt_token_ids": [[9]], "sampling_params": {"max_tokens": 4, "stop_token_ids": [9]}})

    asyncio.run(run())
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert [request.sampling.stop_token_ids for request in engines.requests] == [(end,), (9, end)]


def test_responses_keep_reasoning_markers():
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    texts = ["#### 42<|im_end|>", "41?</think>#### 42<|im_end|>"]
    engines = ScriptedEngine(lambda request: tokenizer.encode(texts.pop(0), add_special_tokens=False))
    client = InferenceEngineClient(engines, tokenizer, config(SYNCHRONOUS))  # type: ignore[arg-type]

    async def run() -> list[str]:
        question = [{"role": "user", "content": "6 * 7?"}]
        batch: Any = {"prompts": [question, question], "sampling_params": {"max_tokens": 99}}
        return (await client.generate(batch))["responses"]

    assert asyncio.run(run()) == ["<think>\n#### 42", "<think>\n41?</think>#### 42"]


def test_text_is_complete_continued_message():
    async def run() -> None:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nSo"}]
        group = await rollouts(FixedGenerator(), SYNCHRONOUS).rollout(Prompt("0", messages, "mine"), 0)
        item = group.trajectories[0]
        assert item.text == item.messages[-1]["content"] == f"<think>\nSo{TOKENIZER.decode([70, 71])}"

    asyncio.run(run())
