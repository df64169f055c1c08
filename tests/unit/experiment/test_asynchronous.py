"""Requirements of asynchronous training on engines and group filters, from configuration."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.keys import replace_value
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import build_policy_objective_spec
from skyrl_train.experiment.publisher import pause_mode
from skyrl_train.experiment.trainer import build_generator, build_group_filter_settings
from skyrl_train.rollouts.collector import DynamicSampling
from skyrl_train.rollouts.conversation import ConversationGenerator
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

AHEAD = ("trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false")


def config(*overrides: str) -> Config:
    return prepare_config(
        ["trainer.policy.model.path=model", *overrides], has_user_code=True, has_accelerator=True
    ).config


@pytest.mark.parametrize(
    ("override", "mode"),
    [
        ("on_sync=keep", "keep"),
        ("on_sync=recompute", "retract"),
        ("on_sync=abort", "abort"),
        ("clear_kv_cache_on_weight_sync=false", "keep"),
        ("clear_kv_cache_on_weight_sync=true", "retract"),
    ],
)
def test_on_sync_selects_pause_mode(override: str, mode: str):
    able = ScriptedEngine(capabilities=replace(ALL_CAPABILITIES, pause_modes=frozenset({"keep", "abort", "retract"})))
    assert pause_mode(config(*AHEAD, f"trainer.fully_async.{override}"), [able]) == mode


def test_engine_without_pause_mode_is_refused():
    server = ScriptedEngine(
        name="server", capabilities=replace(ALL_CAPABILITIES, pause_modes=frozenset({"abort", "retract"}))
    )
    with pytest.raises(ConfigError, match=r"on_sync=keep: engine 'server' cannot .* supports: recompute, abort"):
        pause_mode(config(*AHEAD), [ScriptedEngine(), server])
    assert pause_mode(config(), [server]) is None


def test_abort_without_seeds_warns(caplog: pytest.LogCaptureFixture):
    able = frozenset({"abort", "retract"})
    for seeds in (True, False):
        server = ScriptedEngine(name="server", capabilities=replace(ALL_CAPABILITIES, pause_modes=able, seeds=seeds))
        with caplog.at_level(logging.WARNING):
            assert pause_mode(config(*AHEAD, "trainer.fully_async.on_sync=abort"), [server]) == "abort"
        assert ("engine 'server' does not support seeds" in caplog.text) == (not seeds)


def test_full_batch_replaces_groups_with_equal_rewards():
    full = "trainer.fully_async.sample_full_batch=true"
    filtered = config(*AHEAD, full, "trainer.algorithm.zero_variance_filter=true")
    off = "trainer.fully_async.sample_full_batch=false"
    assert build_group_filter_settings(filtered).dynamic_sampling == DynamicSampling(
        max_sample_batches=30, disable_hint=off
    )
    assert (
        build_group_filter_settings(replace_value(filtered, "trainer.fully_async.enabled", False)).dynamic_sampling
        is None
    )
    with pytest.raises(ConfigError, match=r"sample_full_batch.*false without trainer\.algorithm\.zero_variance_filter"):
        config(*AHEAD, full)


@pytest.mark.defect("rate-limit-applies-twice")
def test_evaluation_shares_rate_limit_with_training():
    cfg = config(*AHEAD, "generator.rate_limit.enabled=true", "generator.rate_limit.max_concurrency=32")
    client: Any = EngineClient([ScriptedEngine()], deadline_s=5)
    training, evaluation = (
        build_generator(cfg, byte_tokenizer(), client, None, evaluation=evaluation)  # type: ignore[arg-type]
        for evaluation in (False, True)
    )
    assert isinstance(training, ConversationGenerator) and isinstance(evaluation, ConversationGenerator)
    assert training._limiter is evaluation._limiter is not None


class OneTurn:
    """Environments whose episodes end with the first answer."""

    async def start(self, env_class: str, prompt: Prompt) -> OneTurn:
        self.messages = prompt.messages
        return self

    async def step(self, text: str) -> StepOutput:
        return StepOutput([], 1.0, done=True, metadata={})

    async def close(self) -> None:
        pass


def test_evaluation_and_training_have_distinct_requests():
    client: Any = EngineClient([engine := ScriptedEngine()], deadline_s=5)
    prompt = Prompt("7", [{"role": "user", "content": "go"}], "one turn")

    async def both() -> None:
        for evaluation in (False, True):
            generator = build_generator(
                config(*AHEAD),
                byte_tokenizer(),
                client,
                OneTurn(),  # type: ignore[arg-type]
                evaluation=evaluation,
            )
            await generator.rollout(prompt, position=3)

    asyncio.run(both())
    training, evaluation = (
        {name for request in batch for name in (request.request_id, request.session, request.group)}
        for batch in engine.batches
    )
    assert training and evaluation and not training & evaluation


@pytest.mark.parametrize(
    ("override", "warns"),
    [
        ("trainer.seed=1", True),
        ("trainer.fully_async.max_staleness_steps=0", False),
        ("trainer.algorithm.off_policy_correction.tis_ratio_type=token", False),
        ("trainer.algorithm.policy_loss_type=rollout_is", False),
        ("trainer.algorithm.policy_loss_type=cispo", True),
        ("trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_anchor=rollout", False),
        # a mask does not weigh the tokens that it keeps
        ("trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=100", True),
    ],
)
@pytest.mark.defect("false-off-policy-warnings")
def test_uncorrected_stale_samples_warn(override: str, warns: bool, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        build_policy_objective_spec(config(*AHEAD, *override.split()))
    assert ("off_policy_correction.tis_ratio_type=token" in caplog.text) == warns


@pytest.mark.parametrize("evaluation", [False, True])
def test_requests_end_at_the_templates_end_of_turn(evaluation: bool):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["chatml"].replace("<|im_end|>", "<|endoftext|>")
    client: Any = EngineClient([engine := ScriptedEngine()], deadline_s=5)
    generator = build_generator(config(), tokenizer, client, OneTurn(), evaluation=evaluation)  # type: ignore[arg-type]
    asyncio.run(generator.rollout(Prompt("7", [{"role": "user", "content": "go"}], "one turn"), position=3))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert {request.sampling.stop_token_ids for request in engine.batches[0]} == {(end,)}
