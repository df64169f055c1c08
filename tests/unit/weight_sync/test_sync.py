from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import DeadlineExceeded, NonFiniteWeights, WeightSyncError
from skyrl_train.learner.learner import WorkerGroup
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.weight_targets import FakeEngine, LocalTrainer, score

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
PROBE_TOKENS = [[1, 2, 3, 4, 5], [6, 7, 8]]


def perturb(model: PreTrainedModel, by: float = 0.05) -> None:
    """Change every parameter, as an optimizer step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def in_process(*engines: FakeEngine, probed: bool = False, **probe: Any) -> tuple[LocalTrainer, WeightSync]:
    trainer = LocalTrainer(tiny_model(seed=1, **SMALL))

    async def trainer_score(token_ids):
        return score(trainer.model, token_ids)

    active_probe = Probe(PROBE_TOKENS, trainer_score, **probe) if probed else None
    return trainer, WeightSync(trainer, lambda: engines, route="in_process", deadline_s=30, probe=active_probe)


def engine_named(name: str, seed: int = 2) -> FakeEngine:
    return FakeEngine(tiny_model(seed=seed, **SMALL), name)


def test_all_engines_get_weights_and_metrics_count_bytes():
    engines = [engine_named("left"), engine_named("right", seed=3)]
    trainer, weight_sync = in_process(*engines, probed=True)
    for version in (0, 1, 2):
        perturb(trainer.model)
        metrics = asyncio.run(weight_sync.sync_all(version))
        for engine in engines:
            for name, tensor in trainer.model.named_parameters():
                assert torch.equal(engine.model.get_parameter(name), tensor), name
    size = sum(tensor.nbytes for tensor in trainer.model.parameters())
    assert metrics.pop("weights/probe_gap_mean") <= metrics.pop("weights/probe_gap") <= 1e-5
    assert metrics == {"weights/version": 2, "weights/bytes": size, "weights/buckets": -(-size // (1 << 16))}


@pytest.mark.parametrize("other_machine", [False, True])
def test_trainer_address_is_reachable_from_engine_nodes(other_machine: bool):
    requested = []

    class Trainer(LocalTrainer):
        def address(self, other_nodes: bool = False) -> tuple[str, int]:
            requested.append(other_nodes)
            return super().address()

    near, far = engine_named("near"), engine_named("far")
    far.capabilities = replace(far.capabilities, other_machine=other_machine)
    trainer = Trainer(tiny_model(seed=1, **SMALL))
    asyncio.run(WeightSync(trainer, lambda: [near, far], route="broadcast", deadline_s=30).sync_all(1))
    assert requested == [other_machine]
    trainer.sender.close()
    for engine in (near, far):
        engine.receiver.close()


def test_verify_names_engine_with_old_version():
    engines = [engine_named("left"), engine_named("right")]
    trainer, weight_sync = in_process(*engines)
    asyncio.run(weight_sync.sync_all(1))
    asyncio.run(weight_sync.verify(1, engines))
    perturb(trainer.model)
    with pytest.raises(WeightSyncError, match="engine left serves version 1, but the trainer is at version 2"):
        asyncio.run(weight_sync.verify(2, engines))


def test_probe_finds_engine_with_wrong_weights():
    engines = [engine_named("left"), engine_named("right")]
    trainer, weight_sync = in_process(*engines, probed=True)
    asyncio.run(weight_sync.sync_all(1))
    perturb(trainer.model)
    for engine in engines:
        engine.receiver.version = 2  # as after a sync that was reported but never happened
    with pytest.raises(
        WeightSyncError, match=r"engine left: log-probs of the probe's tokens differ .* stale or corrupt"
    ):
        asyncio.run(weight_sync.verify(2, engines))
    for engine in engines:
        engine.receiver.version = 1
    asyncio.run(weight_sync.sync_all(2))
    with torch.no_grad():
        engines[1].model.get_parameter("model.norm.weight")[0] = torch.nan
    with pytest.raises(WeightSyncError, match=r"engine right: .* differ from the trainer's by nan"):
        asyncio.run(weight_sync.verify(2, engines))


def test_engine_that_ignores_commit_fails_verification():
    class IgnoresCommit(FakeEngine):
        async def commit_weights(self, version: int) -> None: ...

    _, weight_sync = in_process(IgnoresCommit(tiny_model(seed=2, **SMALL), "idle"))
    with pytest.raises(WeightSyncError, match="engine idle is partially loaded"):
        asyncio.run(weight_sync.sync_all(1))


def test_partially_loaded_engine_fails_verification():
    engine = engine_named("left")
    _, weight_sync = in_process(engine)
    asyncio.run(weight_sync.sync_all(1))
    engine.receiver.partially_loaded = True  # as after a later transfer of the same weights that failed
    with pytest.raises(WeightSyncError, match="engine left is partially loaded"):
        asyncio.run(weight_sync.verify(1, [engine]))


def test_nan_in_probe_fails_verification():
    class Broken(FakeEngine):
        async def score(self, token_ids, temperature: float = 1.0) -> list[list[float]]:
            logprobs = await super().score(token_ids, temperature)
            logprobs[-1][-1] = float("nan")
            return logprobs

    _, weight_sync = in_process(Broken(tiny_model(seed=2, **SMALL), "broken"), probed=True)
    with pytest.raises(WeightSyncError, match=r"engine broken: .* by nan nats"):
        asyncio.run(weight_sync.sync_all(1))


def test_tolerance_is_relative_for_unlikely_tokens():
    """Random models assign log-probs near -4 to their 64 tokens, so 0.25 of that is 1 nat."""

    class Rounded(FakeEngine):
        share = 0.2

        async def score(self, token_ids, temperature: float = 1.0) -> list[list[float]]:
            return [[value * (1 + self.share) for value in row] for row in await super().score(token_ids, temperature)]

    engine = Rounded(tiny_model(seed=2, **SMALL), "rounded")
    _, weight_sync = in_process(engine, probed=True, tolerance=0.25)
    assert asyncio.run(weight_sync.sync_all(1))["weights/probe_gap"] > 0.5
    engine.share = 0.3
    with pytest.raises(WeightSyncError, match=r"by 1\.\d+ nats, and by 0\.3 of a token's log-prob .*allowed: 0\.25"):
        asyncio.run(weight_sync.sync_all(2))


def test_self_test_ends_with_true_weights():
    engines = [engine_named("left"), engine_named("right")]
    trainer, weight_sync = in_process(*engines, probed=True)
    metrics = asyncio.run(weight_sync.self_test(0))
    assert metrics["weights/self_test_gap"] > 0.1
    assert metrics["weights/probe_gap"] <= 1e-5
    for engine in engines:
        assert (engine.receiver.version, engine.receiver.partially_loaded) == (0, False)
        assert torch.equal(engine.model.get_parameter("model.norm.weight"), trainer.model.model.norm.weight)


@pytest.mark.fault("F31")
def test_self_test_notices_engine_that_ignores_weights():
    class IgnoresWeights(FakeEngine):
        """Scores with weights that equal the trainer's, whatever it receives."""

        async def score(self, token_ids, temperature: float = 1.0) -> list[list[float]]:
            return score(tiny_model(seed=1, **SMALL), token_ids, temperature)

    engines = [engine_named("left"), IgnoresWeights(tiny_model(seed=2, **SMALL), "deaf")]
    _, weight_sync = in_process(*engines, probed=True)
    asyncio.run(weight_sync.sync_all(0))  # the probe alone does not notice it
    with pytest.raises(WeightSyncError, match=r"engine deaf: perturbed weights changed .* does not load the weights"):
        asyncio.run(weight_sync.self_test(1))


class Shifted(FakeEngine):
    """An engine that computes another model than the trainer, so that its log-probs are off."""

    by = 0.2

    async def score(self, token_ids, temperature: float = 1.0) -> list[list[float]]:
        return [[value - self.by for value in row] for row in await super().score(token_ids, temperature)]


ONCE: dict[str, Any] = {"tolerance": math.inf, "mean_tolerance": 0.1, "every_sync": False}


def test_probe_of_the_first_sync_is_asked_once():
    engine = engine_named("only")
    _, weight_sync = in_process(engine, probed=True, **ONCE)
    first = asyncio.run(weight_sync.sync_all(0))
    assert 0.0 <= first["weights/probe_gap_mean"] <= first["weights/probe_gap"] <= 1e-5
    assert asyncio.run(weight_sync.sync_all(1)).keys() == {"weights/version", "weights/bytes", "weights/buckets"}


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (0.2, r"log-probs of the first prompts .* \(allowed: 0.1; .*weight_sync_check=off"),
        (-0.2, "by 0.2 nats on average"),
        (float("nan"), "by nan nats"),
    ],
)
def test_different_model_is_named_at_first_sync(by: float, message: str):
    engine = Shifted(tiny_model(seed=2, **SMALL), "shifted")
    engine.by = by
    _, weight_sync = in_process(engine_named("right"), engine, probed=True, **ONCE)
    for version in range(2):
        with pytest.raises(WeightSyncError, match=rf"engine shifted: .*{message}"):
            asyncio.run(weight_sync.sync_all(version))
    engine.by = 0.05
    assert asyncio.run(weight_sync.sync_all(2))["weights/probe_gap_mean"] == pytest.approx(0.05, abs=1e-4)


def test_self_test_precedes_the_first_sync_alone():
    engine = engine_named("only")
    trainer, weight_sync = in_process(engine, probed=True, self_test=True)
    assert asyncio.run(weight_sync.sync_all(0))["weights/self_test_gap"] > 0.1
    assert torch.equal(engine.model.get_parameter("model.norm.weight"), trainer.model.model.norm.weight)
    assert "weights/self_test_gap" not in asyncio.run(weight_sync.sync_all(1))


@pytest.mark.fault("F30")
def test_rejected_manifest_keeps_old_weights_everywhere():
    engines = [engine_named("left"), FakeEngine(tiny_model(vocab_size=65, hidden_size=32), "right")]
    _, weight_sync = in_process(*engines)
    before = engines[0].model.get_parameter("model.embed_tokens.weight").clone()
    with pytest.raises(
        WeightSyncError, match=r"engine right: model\.embed_tokens\.weight is announced with shape \[64, 32\]"
    ):
        asyncio.run(weight_sync.sync_all(1))
    assert torch.equal(engines[0].model.get_parameter("model.embed_tokens.weight"), before)
    assert not any(engine.receiver.partially_loaded for engine in engines)


@pytest.mark.fault("F31")
def test_a_version_going_backwards_is_raised():
    engine = engine_named("only")
    _, weight_sync = in_process(engine)
    asyncio.run(weight_sync.sync_all(5))
    with pytest.raises(WeightSyncError, match="engine only: version 4 is stale"):
        asyncio.run(weight_sync.sync_all(4))
    assert engine.receiver.version == 5


@pytest.mark.defect("partially-updated-weights-keep-old-version")
def test_version_is_never_reused_for_other_weights():
    left, right = engine_named("left"), engine_named("right")
    trainer, weight_sync = in_process(left)
    asyncio.run(weight_sync.sync_all(1))
    perturb(trainer.model)
    trainer.updates += 1
    before = {name: tensor.clone() for name, tensor in right.model.named_parameters()}
    with pytest.raises(WeightSyncError, match=r"version 1 was made by 0 optimizer steps .* and now by 1"):
        asyncio.run(weight_sync.sync_one(right, 1))
    assert all(torch.equal(right.model.get_parameter(name), tensor) for name, tensor in before.items())
    asyncio.run(weight_sync.sync_one(right, 2))
    asyncio.run(weight_sync.sync_all(2))


@pytest.mark.fault("F30")
def test_hung_trainer_has_no_call_left_after_failed_sync():
    trainer = WorkerGroup([HungWorker()])
    weight_sync = WeightSync(trainer, lambda: [engine_named("any")], route="in_process", deadline_s=0.2)

    async def failed_sync() -> int:
        with pytest.raises(DeadlineExceeded, match="the connection of trainer and engines"):
            await weight_sync.sync_all(1)
        return trainer.num_running_calls

    assert asyncio.run(failed_sync()) == 0


class HungWorker:
    """A trainer rank that never finishes a call."""

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> None:
            await asyncio.Event().wait()

        return call


@pytest.mark.fault("F30")
def test_non_finite_weights_blame_the_trainer():
    engine = engine_named("left")
    trainer, weight_sync = in_process(engine)
    with torch.no_grad():
        trainer.model.get_parameter("model.norm.weight")[0] = torch.inf
    with pytest.raises(NonFiniteWeights, match=r"model\.norm\.weight contains NaN .* version 1 of the trainer's"):
        asyncio.run(weight_sync.sync_all(1))
    assert not engine.receiver.partially_loaded
