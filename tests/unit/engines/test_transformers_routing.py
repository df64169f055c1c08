"""The expert routing that the transformers engine records, and its use by the trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.data.batch import collate
from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.rollouts.conversation import TrajectoryBuilder
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import single_sequence
from tests.support.trajectories import completion_from, trajectory_from

PROMPTS = [(5, 6, 7, 8, 9, 10, 11), (20, 21, 22), (5, 6, 7, 8, 9, 10, 11), (30,)]


def requests(count: int) -> list[SampleRequest]:
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    return [
        SampleRequest(str(i), to_token_array(prompt), sampling, seed=i, group=str(prompt))
        for i, prompt in enumerate(PROMPTS)
    ]


def sample(kind: str, retracted: bool = False) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = TransformersEngine(tiny_model(kind), keeps_routing=True, max_num_seqs=3)
        try:
            call = asyncio.create_task(engine.generate(requests(40)))
            while retracted and (await engine.health()).generated_tokens < 12:
                await asyncio.sleep(0)
            if retracted:
                await engine.pause("retract")
                await engine.resume()
            return await call
        finally:
            await engine.close()

    return asyncio.run(run())


def trainer_routing(kind: str, tokens: list[int]) -> np.ndarray:
    model = tiny_model(kind)
    logprob_model = LogprobModel(model)
    logprob_model.routers.record_routed_experts = True
    with torch.no_grad():
        logprob_model(logprob_model.lay_out(single_sequence(tokens, 1)))
    assert logprob_model.routed_experts is not None
    return logprob_model.routed_experts.numpy()


@pytest.mark.parametrize("retracted", [False, True])
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "granitemoehybrid", "kimi_linear"]
)
def test_completion_routing_matches_trainer(kind: str, retracted: bool) -> None:
    for prompt, completion in zip(PROMPTS, sample(kind, retracted), strict=True):
        tokens = [*prompt, *completion.token_ids]
        assert completion.routing.dtype == np.int16
        expected = trainer_routing(kind, tokens)[:-1]
        assert completion.routing.shape == expected.shape
        agreement = (np.sort(completion.routing, -1) == np.sort(expected, -1)).mean()
        assert agreement > 0.99, "in float32 almost no choice depends on rounding"


@pytest.mark.parametrize("tokens", [1, 2])
def test_routing_of_short_response_covers_prompt(tokens: int) -> None:
    async def run() -> list[Completion]:
        engine = TransformersEngine(tiny_model("qwen3_moe"), keeps_routing=True)
        try:
            return await engine.generate(requests(tokens))
        finally:
            await engine.close()

    for prompt, completion in zip(PROMPTS, asyncio.run(run()), strict=True):
        assert completion.routing.shape == (len(prompt) + tokens - 1, 2, 2)


def test_routing_of_known_tokens_is_left_out() -> None:
    async def run() -> list[list[Completion]]:
        engine = TransformersEngine(tiny_model("qwen3_moe"), keeps_routing=True)
        try:
            later = [replace(request, known_routing=1) for request in requests(3)]
            return [await engine.generate(requests(3)), await engine.generate(later)]
        finally:
            await engine.close()

    for complete, rest in zip(*asyncio.run(run()), strict=True):
        assert (rest.routing == complete.routing[1:]).all()


def test_model_without_experts_cannot_record_routing() -> None:
    with pytest.raises(EngineError, match="cannot record expert routing: Qwen2ForCausalLM has no routers"):
        TransformersEngine(tiny_model(), keeps_routing=True)


def routing(*rows: int) -> np.ndarray:
    return np.array(rows, dtype=np.int16).reshape(-1, 1, 1)


def completion(ids: list[int], routing: Any) -> Completion:
    return completion_from("r", ids, [-1.0] * len(ids), [-1.0] * len(ids), "stop", [], routing=routing)


@pytest.mark.parametrize("leaves_out_known", [True, False])
def test_earlier_turns_keep_their_sampled_routing(leaves_out_known: bool) -> None:
    item = trajectory_from(Prompt("0", [], "none"), 0, [], [], [], [], [], 0.0, "stop", 1.0)
    builder = TrajectoryBuilder(item)
    builder.start_episode([5, 6])
    builder.append_sample(completion([7, 2], routing(0, 1, 2)))
    assert builder.known_routing == 3
    builder.append_prompt([9])
    # Engines may leave out what is known.
    builder.append_sample(completion([8], routing(4, 5) if leaves_out_known else routing(3, 3, 3, 4, 5)))
    assert builder.known_routing == 5
    builder.restart([5, 9])
    assert builder.known_routing == 0
    builder.append_sample(completion([4, 2], routing(6, 7, 8)))
    plain = trajectory_from(Prompt("1", [], "none"), 1, [5], [6], [1], [-1.0], [], 0.0, "stop", 1.0)
    batch = collate([TrajectoryGroup(item.prompt, [item, plain])])
    assert batch.routing is not None
    assert batch.routing.flatten().tolist() == [0, 1, 2, 4, 5, -1, 6, 7, 8, -1, -1, -1]
    assert batch.select([2, 0]).routing.flatten().tolist() == [-1, -1, 0, 1, 2, 4, 5, -1]  # type: ignore[union-attr]
    assert collate([TrajectoryGroup(plain.prompt, [plain])]).routing is None
    stored = batch.routing.numpy()
    assert len(item.routing) == 2 and all(np.shares_memory(part, stored) for part in item.routing), "no second copy"
    twice = collate([TrajectoryGroup(item.prompt, [item, plain]), TrajectoryGroup(item.prompt, [item, plain])])
    assert twice.routing is not None, "a batch may contain a group twice"
    assert twice.routing.flatten().tolist() == 2 * batch.routing.flatten().tolist()
