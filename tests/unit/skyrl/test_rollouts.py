"""SkyRL's generators as rollouts: what is one call, whose seeds, and what is left when nobody waits any more."""

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
AHEAD = [*SYNCHRONOUS, "trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]


class Engines:
    """Answers with the seed's last digits, and keeps what it was asked."""

    engines = ()

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []

    async def generate(self, requests: list[SampleRequest]) -> list[Completion]:
        self.asked += requests
        return [
            completion_from(one.request_id, [65 + one.seed % 20, 66], [-1.0, -1.0], [-1.0, -1.0], "stop", [])
            for one in requests
        ]


class Plain(GeneratorInterface):
    def __init__(self, client: Any = None, logprobs: bool = True):
        self.client = client
        self.inputs: list[GeneratorInput] = []
        self.logprobs = logprobs
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.ended = False

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        self.inputs.append(input_batch)
        try:
            await self.go_on.wait()
        finally:
            await asyncio.sleep(0.01)
            self.ended = True
        count = len(input_batch["prompts"])
        responses = [[70, 71]] * count
        if self.client is not None:
            given = {"prompt_token_ids": [[1]] * count, "sampling_params": input_batch["sampling_params"]}
            responses = (await self.client.generate(given))["response_ids"]
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
    made = GeneratorInterfaceRollouts(
        generator, generate_settings(config(keys), evaluation=evaluation, needs_logprobs=needs), TOKENIZER
    )
    made.connect(SimpleNamespace(step=step, metrics=Metrics() if metrics is None else metrics))  # type: ignore[arg-type]
    return made


async def all_of(made: GeneratorInterfaceRollouts, count: int) -> list[TrajectoryGroup]:
    return list(await asyncio.gather(*(made.rollout(one, place) for place, one in enumerate(prompts(count)))))


def test_a_synchronous_step_is_one_call_in_the_order_of_the_data():
    async def run() -> None:
        generator, metrics = Plain(), Metrics()
        made = rollouts(generator, SYNCHRONOUS, metrics=metrics)
        groups = await all_of(made, 3)
        (given,) = generator.inputs
        assert [one.to_string() for one in given["trajectory_ids"] or ()] == ["0_0", "0_1", "1_0", "1_1", "2_0", "2_1"]
        assert given["batch_metadata"] is not None and given["batch_metadata"].global_step == 4
        assert [group.prompt.uid for group in groups] == ["0", "1", "2"]
        item = groups[1].trajectories[1]
        assert (item.sample, item.min_version, item.text) == (1, 3, TOKENIZER.decode([70, 71]))
        assert item.messages == [*groups[1].prompt.messages, {"role": "assistant", "content": item.text}]
        assert metrics.flush() == {"mine": 6.0}

    asyncio.run(run())


def test_where_rollouts_run_ahead_each_prompt_is_a_call_and_evaluation_is_one():
    async def run() -> None:
        training, evaluation = Plain(), Plain()
        await asyncio.gather(
            all_of(rollouts(training, AHEAD), 3), all_of(rollouts(evaluation, AHEAD, evaluation=True), 3)
        )
        assert [len(one["prompts"]) for one in training.inputs] == [2, 2, 2]
        (given,) = evaluation.inputs
        assert given["batch_metadata"] is not None and given["batch_metadata"].global_step == 3

    asyncio.run(run())


@pytest.mark.parametrize("keys", [SYNCHRONOUS, AHEAD])
def test_seeds_do_not_depend_on_what_else_is_under_way(keys: list[str]):
    async def sampled(others: bool) -> list[list[int]]:
        engines = Engines()
        client = InferenceEngineClient(engines, TOKENIZER, config(keys))  # type: ignore[arg-type]
        training = all_of(rollouts(Plain(client), keys), 3)
        if others:  # an evaluation of the same uids at the same step, and a call of nobody's
            await all_of(rollouts(Plain(client), keys, evaluation=True), 3)
            await client.generate({"prompt_token_ids": [[9]]})
        groups = await training
        assert len({one.request_id for one in engines.asked}) == len(engines.asked)
        return [item.response_ids.tolist() for group in groups for item in group.trajectories]

    alone, beside = asyncio.run(sampled(False)), asyncio.run(sampled(True))
    assert alone == beside
    assert len({tuple(ids) for ids in alone}) > 1


@pytest.mark.parametrize("keys", [SYNCHRONOUS, AHEAD])
def test_when_rollouts_are_cancelled_their_call_has_ended(keys: list[str]):
    async def run() -> None:
        generator = Plain()
        generator.go_on.clear()
        running = asyncio.ensure_future(all_of(rollouts(generator, keys), 2))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert generator.ended

    asyncio.run(run())


def test_trainer_generate_is_called_in_place_of_the_generators():
    class Around(RayPPOTrainer):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            output = await super().generate(input_batch)
            output["rewards"] = [7.0 for _ in output["rewards"]]
            return output

    cfg, generator = config(SYNCHRONOUS), Plain()
    trainer = Around(cfg, None, TOKENIZER, None, None, generator)
    settings = generate_settings(cfg, evaluation=False, needs_logprobs=False)
    assert RayPPOTrainer(cfg, None, TOKENIZER, None, None, generator).generate_override is None
    made = GeneratorInterfaceRollouts(generator, settings, TOKENIZER, trainer.generate_override)
    (group,) = asyncio.run(all_of(made, 1))
    assert {one.reward for one in group.trajectories} == {7.0}


def test_what_a_generator_raises_ends_every_rollout_of_the_call():
    class Broken(GeneratorInterface):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            raise KeyError("mine")

    async def run() -> list[Any]:
        made = rollouts(Broken(), SYNCHRONOUS)
        return list(await asyncio.gather(*(made.rollout(one, 0) for one in prompts(2)), return_exceptions=True))

    assert [type(one) for one in asyncio.run(run())] == [KeyError, KeyError]


def test_log_probs_that_the_algorithm_reads_must_be_there():
    with pytest.raises(RolloutsFailed, match="no rollout_logprobs, which the configured"):
        asyncio.run(all_of(rollouts(Plain(logprobs=False), SYNCHRONOUS, needs=True), 1))
    (group,) = asyncio.run(all_of(rollouts(Plain(logprobs=False), SYNCHRONOUS), 1))
    assert group.trajectories[0].logprobs.tolist() == []


def test_the_client_takes_both_engines_names_and_sessions():
    async def run() -> None:
        engines = Engines()
        client = InferenceEngineClient(engines, TOKENIZER, config(SYNCHRONOUS))  # type: ignore[arg-type]
        for params in ({"max_tokens": 5, "logprobs": 1}, {"max_new_tokens": 5, "no_stop_trim": True}):
            await client.generate({"prompts": [[{"role": "user", "content": "x"}]], "sampling_params": params})
        assert {one.sampling.max_tokens for one in engines.asked} == {5}
        body = {"messages": [{"role": "user", "content": "x"}], "session_id": "episode 1", "max_tokens": 4}
        answer = await client.chat_completion({"json": body, "headers": {}})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert engines.asked[-1].session.endswith("episode 1")
        refused = await client.chat_completion({"json": body | {"tools": [{}]}})
        assert refused["error"]["param"] == "tools"
        with pytest.raises(ValueError, match="either `prompts` or `prompt_token_ids`"):
            await client.generate({})
        with pytest.raises(AttributeError, match=r"no 'wake_up'\. Instead: leave the call out"):
            await client.wake_up()

    asyncio.run(run())


def test_skyrl_gym_generator_plays_only_rows_of_the_run():
    made = SkyRLGymGenerator(config(SYNCHRONOUS).generator, None, None, TOKENIZER, "m")
    with pytest.raises(RuntimeError, match="from get_generator"):
        asyncio.run(made.generate({"prompts": []}))  # type: ignore[typeddict-item]


def test_text_begins_with_the_reasoning_that_the_prompt_opened():
    class Opening(Plain):
        async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
            output = await super().generate(input_batch)
            opening = TOKENIZER.encode("assistant\n<think>\n", add_special_tokens=False)
            return {**output, "prompt_token_ids": [opening] * len(output["response_ids"])}

    async def run() -> None:
        (group,) = await all_of(rollouts(Opening(), SYNCHRONOUS), 1)
        assert group.trajectories[0].messages[-1]["content"] == f"<think>\n{TOKENIZER.decode([70, 71])}"

    asyncio.run(run())


def test_completions_end_at_the_templates_end_of_turn():
    engines = Engines()
    client = InferenceEngineClient(engines, TOKENIZER, config(SYNCHRONOUS))  # type: ignore[arg-type]

    async def run() -> None:
        await client.generate({"prompt_token_ids": [[9]]})
        await client.generate({"prompt_token_ids": [[9]], "sampling_params": {"max_tokens": 4, "stop_token_ids": [9]}})

    asyncio.run(run())
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    assert [request.sampling.stop_token_ids for request in engines.asked] == [(end,), (9, end)]


def test_responses_keep_the_markers_of_reasoning():
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    texts = ["#### 42<|im_end|>", "41?</think>#### 42<|im_end|>"]
    engines = ScriptedEngine(lambda request: tokenizer.encode(texts.pop(0), add_special_tokens=False))
    client = InferenceEngineClient(engines, tokenizer, config(SYNCHRONOUS))  # type: ignore[arg-type]

    async def run() -> list[str]:
        question = [{"role": "user", "content": "6 * 7?"}]
        given: Any = {"prompts": [question, question], "sampling_params": {"max_tokens": 99}}
        return (await client.generate(given))["responses"]

    assert asyncio.run(run()) == ["<think>\n#### 42", "<think>\n41?</think>#### 42"]


def test_text_is_the_whole_continued_message():
    async def run() -> None:
        begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\nSo"}]
        group = await rollouts(Plain(), SYNCHRONOUS).rollout(Prompt("0", begun, "mine"), 0)
        item = group.trajectories[0]
        assert item.text == item.messages[-1]["content"] == f"<think>\nSo{TOKENIZER.decode([70, 71])}"

    asyncio.run(run())
