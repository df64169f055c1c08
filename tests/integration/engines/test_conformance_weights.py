"""Weights reach every engine over every route, completely or not at all, and errors name the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.errors import DeadlineExceeded, EngineError, SkyRLError, UnsupportedParameter, WeightSyncError
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, Bucket
from tests.support.engine_harness import TOLERANCE, EngineHarness, assert_logprobs
from tests.support.reference_sampler import Reference
from tests.support.weight_targets import LocalTrainer

PROMPT = tuple(3 + (7 * n) % 250 for n in range(150))
STAGED = "checkpoint"
"""The route that overwrites no tensor before all have arrived."""


@pytest.fixture
def reference(bench: EngineHarness) -> Reference:
    """The reference of random weights, which the engine serves."""
    return bench.serve(bench.random_model(0), "random")


def perturb(model: torch.nn.Module) -> None:
    """Change every parameter, like an optimizer step."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def assert_serves(bench: EngineHarness, reference: Reference) -> None:
    """Check that sampling uses no weights, keys or values of another version than the reference's."""
    for temperature in (0.0, 1.0):
        request = bench.request(PROMPT, temperature=temperature)
        (completion,) = bench.generate(request)
        assert_logprobs(reference, request, completion)
        if temperature == 0.0:
            assert completion.token_ids.tolist() == reference.greedy(PROMPT, 16)
        assert {span.version for span in completion.versions} == {bench.run(bench.engine.health()).version}


def assert_partially_loaded(bench: EngineHarness) -> None:
    assert bench.run(bench.engine.health()).partially_loaded
    for call in (bench.engine.generate([bench.request(PROMPT)]), bench.engine.score([[1, 2, 3]])):
        with pytest.raises(EngineError, match="is not fully loaded"):
            bench.run(call)


class PerturbingTrainer(LocalTrainer):
    """A trainer that changes one bit of one parameter between the manifest and the transfer."""

    def __init__(self, model: Any, perturbed_name: str):
        super().__init__(model, bucket_bytes=1 << 14)
        self.perturbed_name = perturbed_name
        self._announced = False

    def prepare_manifest(self, version: int, perturbed: bool = False) -> Any:
        manifest = super().prepare_manifest(version, perturbed)
        self._announced = True
        return manifest

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().parameters():
            if self._announced and name == self.perturbed_name:
                tensor = tensor.detach().clone()
                tensor.view(torch.int32).view(-1)[-1] ^= 1  # the smallest possible change
            yield name, tensor


class DroppingEngine:
    """An engine that loses one bucket."""

    def __init__(self, engine: Any, lost: int):
        self._engine = engine
        self._lost = lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def receive_weights(self, bucket: Bucket) -> None:
        if bucket.index != self._lost:
            await self._engine.receive_weights(bucket)


def test_every_route_works_or_is_rejected_by_name(bench: EngineHarness):
    for route in [*(WEIGHT_ROUTES - bench.capabilities.weight_routes), "pigeon"]:
        with pytest.raises((UnsupportedParameter, WeightSyncError), match=route) as caught:
            bench.run(bench.engine.connect_weights(route, "", 1, 2, 1.0))
        assert bench.cheapest_route in str(caught.value), "the message lists the supported routes"


# -- successful syncs -------------------------------------------------------------------------------------------------


def test_engine_serves_new_weights_after_every_sync(bench: EngineHarness, route: str, reference: Reference):
    async def run() -> None:
        async with bench.syncing(route) as weight_sync:
            for _ in range(2):
                version = await bench.next_version()
                perturb(bench.model)
                metrics = await weight_sync.sync_all(version)
                assert metrics["weights/probe_gap"] <= TOLERANCE
                assert metrics["weights/buckets"] > 3
                assert (await bench.engine.health()).version == version

    bench.model = bench.random_model(3)
    bench.run(run())
    assert_serves(bench, Reference(bench.model))


def test_bucket_size_determines_number_of_buckets(bench: EngineHarness, route: str, reference: Reference):
    for bucket_bytes, is_single in ((1, False), (1 << 30, True)):
        bench.model = bench.random_model(4)
        trainer = LocalTrainer(bench.model, bucket_bytes=bucket_bytes)

        async def run(trainer: LocalTrainer = trainer) -> dict[str, float]:
            async with bench.syncing(route, trainer=trainer) as weight_sync:
                return await weight_sync.sync_all(await bench.next_version())

        tensors = len(list(bench.model.parameters()))
        assert bench.run(run())["weights/buckets"] == (1 if is_single else tensors)
    assert_serves(bench, Reference(bench.model))


def change_few_elements(model: torch.nn.Module) -> None:
    """Change about 2 % of the elements of most matrices, and all elements of a norm."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "layers.0.mlp" not in name:
                parameter.mul_(1 - 1.5 * (torch.rand(parameter.shape, generator=generator) < 0.02))
        model.get_parameter("model.norm.weight").mul_(0.9)


def test_sync_of_changed_elements_equals_complete_sync(bench: EngineHarness, route: str, reference: Reference):
    bench.model = bench.random_model(5)
    trainer = LocalTrainer(bench.model, bucket_bytes=1 << 14, weight_sync_only_changed=True)
    request = bench.request(PROMPT, temperature=0.0)

    async def run() -> None:
        async with bench.syncing(route, trainer=trainer) as weight_sync:
            complete = await weight_sync.sync_all(await bench.next_version())
            for _ in range(2):
                change_few_elements(bench.model)
                part = await weight_sync.sync_all(await bench.next_version())
                assert 0.01 < part["weights/changed"] < 0.03
                assert part["weights/bytes"] < 0.1 * complete["weights/bytes"]
            (sampled,) = await bench.engine.generate([request])
            await weight_sync.sync_one(bench.engine, await bench.next_version())
            (expected,) = await bench.engine.generate([request])
            assert sampled.token_ids.tolist() == expected.token_ids.tolist()
            assert sampled.full_logprobs.tolist() == expected.full_logprobs.tolist()

    bench.run(run())
    assert_serves(bench, Reference(bench.model))


def test_self_test_gap_closes_with_true_weights(bench: EngineHarness, route: str, reference: Reference):
    bench.model = bench.random_model(6)

    async def run() -> tuple[int, dict[str, float]]:
        version = await bench.next_version()
        async with bench.syncing(route) as weight_sync:
            return version, await weight_sync.self_test(version)

    version, metrics = bench.run(run())
    assert metrics["weights/self_test_gap"] > 0.1
    assert metrics["weights/probe_gap"] <= TOLERANCE
    assert bench.run(bench.engine.health()).version == version
    assert_serves(bench, Reference(bench.model))


# -- failed syncs -----------------------------------------------------------------------------------------------------


def failing_sync(
    bench: EngineHarness, route: str, error: type[SkyRLError] | tuple[type[SkyRLError], ...], match: str, **between: Any
) -> None:
    """Check that a sync of the next version raises `error`."""

    async def run() -> None:
        async with bench.syncing(route, **between) as weight_sync:
            with pytest.raises(error, match=match):
                await weight_sync.sync_all(await bench.next_version())

    bench.run(run())


def assert_old_or_partial_then_repaired(bench: EngineHarness, route: str, old: Reference) -> None:
    """Check that a staged route still serves the old weights, others serve none, and a full sync repairs both."""
    if route == STAGED:
        assert not bench.run(bench.engine.health()).partially_loaded
        assert_serves(bench, old)
    else:
        assert_partially_loaded(bench)

    async def repair() -> None:
        async with bench.syncing(route) as weight_sync:
            await weight_sync.sync_all(await bench.next_version())

    bench.run(repair())
    assert not bench.run(bench.engine.health()).partially_loaded
    assert_serves(bench, Reference(bench.model))


def unserved_model(bench: EngineHarness, seed: int) -> Any:
    bench.model = bench.random_model(seed)
    return bench.model


@pytest.mark.fault("F30")
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_flipped_bit_error_names_tensor(bench: EngineHarness, route: str, reference: Reference, name: str):
    trainer = PerturbingTrainer(unserved_model(bench, 8), name)
    failing_sync(bench, route, WeightSyncError, rf"{name}.* changed in transit", trainer=trainer)
    assert_old_or_partial_then_repaired(bench, route, reference)


@pytest.mark.fault("F30")
def test_lost_bucket_error_names_it(bench: EngineHarness, route: str, reference: Reference):
    buckets = plan_buckets(LocalTrainer(unserved_model(bench, 9), bucket_bytes=1 << 14).prepare_manifest(1))
    third, last = DroppingEngine(bench.engine, 2), DroppingEngine(bench.engine, len(buckets) - 1)
    failing_sync(bench, route, WeightSyncError, "bucket 2 is missing: bucket 3 was sent instead", engine=third)
    if route == "broadcast":  # The sender waits for a receiver of the last bucket.
        message = rf"bucket {len(buckets)} of {len(buckets)} \({buckets[-1].names[0]}"
        failing_sync(bench, route, DeadlineExceeded, message, engine=last, deadline_s=3)
    else:
        failing_sync(bench, route, WeightSyncError, rf"{buckets[-1].names[0]}.* never arrived", engine=last)
    assert_old_or_partial_then_repaired(bench, route, reference)


@pytest.mark.fault("F31")
@pytest.mark.parametrize("behind", [0, 1])
def test_stale_version_is_rejected_and_weights_stay(
    bench: EngineHarness, route: str, reference: Reference, behind: int
):
    trainer = LocalTrainer(bench.random_model(0))

    async def run() -> None:
        version = await bench.next_version()
        async with bench.syncing(route, trainer=trainer) as weight_sync:
            await weight_sync.sync_all(version)
            perturb(trainer.model)
            stale = version - behind
            with pytest.raises(WeightSyncError, match=f"version {stale} is stale: version {version} is being"):
                await weight_sync.sync_all(stale)

    bench.run(run())
    assert_serves(bench, reference)


def test_another_trainer_may_start_at_any_version(bench: EngineHarness, route: str, reference: Reference):
    async def run() -> None:
        version = (await bench.engine.health()).version
        trainer = LocalTrainer(bench.random_model(12))
        async with bench.syncing(route, trainer=trainer) as weight_sync:
            await weight_sync.sync_all(version - 1)
        assert (await bench.engine.health()).version == version - 1

    bench.serve(bench.random_model(0))
    bench.run(run())
    assert_serves(bench, Reference(bench.random_model(12)))


def without_norm(trainer: LocalTrainer) -> Any:
    return ((name, tensor) for name, tensor in trainer.model.named_parameters() if name != "model.norm.weight")


def with_an_infinity(trainer: LocalTrainer) -> Any:
    for name, tensor in trainer.model.named_parameters():
        yield name, tensor.detach() / 0 if name == "model.norm.weight" else tensor


def with_another_shape(trainer: LocalTrainer) -> Any:
    for name, tensor in trainer.model.named_parameters():
        yield name, tensor[:-1] if name == "model.norm.weight" else tensor


def with_extra_tensor(trainer: LocalTrainer) -> Any:
    yield from trainer.model.named_parameters()
    yield "model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (without_norm, r"the engine has model\.norm\.weight, but"),
        (with_an_infinity, r"model\.norm\.weight contains NaN or infinity"),
        (with_another_shape, r"model\.norm\.weight is announced with shape \[63\], but the engine's is \[64\]"),
        (with_extra_tensor, r"model\.layers\.9\.mlp\.up_proj\.weight was announced, but"),
    ],
)
def test_mismatched_weights_are_rejected_before_transfer(
    bench: EngineHarness, reference: Reference, parameters: Callable[[LocalTrainer], Any], message: str
):
    class Misfit(LocalTrainer):
        def parameters(self) -> Iterator[tuple[str, Tensor]]:
            yield from parameters(self)

    async def run() -> None:
        async with bench.syncing(trainer=Misfit(bench.random_model(13))) as weight_sync:
            with pytest.raises(WeightSyncError, match=message):
                await weight_sync.sync_all(await bench.next_version())

    bench.run(run())
    assert not bench.run(bench.engine.health()).partially_loaded
    assert_serves(bench, reference)


def test_skipped_sync_error_names_engine(bench: EngineHarness, reference: Reference):
    trainer = LocalTrainer(bench.random_model(14))

    async def run() -> None:
        async with bench.syncing(trainer=trainer) as weight_sync:
            with pytest.raises(WeightSyncError, match=f"engine {bench.capabilities.name}.* stale or corrupt"):
                await weight_sync.verify((await bench.engine.health()).version, [bench.engine])

    bench.run(run())


def test_commit_without_manifest_is_rejected(bench: EngineHarness, reference: Reference):
    with pytest.raises(WeightSyncError, match="Begin a sync first"):
        bench.run(bench.engine.commit_weights(99))
    assert_serves(bench, reference)
