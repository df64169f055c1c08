"""Weight syncs of a run: how weights get to the engines, what is checked, and which engines are restarted with them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

from skyrl_train.config.predicates import shares_memory, wants_adapter, weight_route
from skyrl_train.config.schema import Config
from skyrl_train.data.batch import Demonstration, demonstration_batch
from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import template_kwargs_of
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.supervisor import EngineSupervisor
from skyrl_train.errors import ConfigError, SkyRLError, WorkerDied
from skyrl_train.experiment.engines import EngineSeats, WantedEngines, build_watch, connect_engine
from skyrl_train.experiment.layout import weight_folder
from skyrl_train.experiment.services import Services
from skyrl_train.learner.learner import ANSWER_S, Learner, WorkerGroup
from skyrl_train.weight_sync.sync import PROBE_TOLERANCE, Probe, WeightPublisher

log = logging.getLogger(__name__)
HALF_PRECISION_PROBE_TOLERANCE = 0.25
"""In nats; it is this large because bfloat16 engines and trainers round differently in every layer."""
HALF_PRECISION_MEAN_TOLERANCE = 0.1
"""In nats, of the mean over the probe's tokens: docs/engines.md has what was measured."""
PROBE_SEQUENCES = 4
PROBE_TOKENS = 64
"""Tokens per sequence of the log-prob probe, whose sequences are the beginnings of the first training prompts."""


def build_publisher(
    base: Services, client: EngineClient, tokenizer: Any, train_dataset: PromptDataset
) -> SupervisedPublisher:
    """Return the weight syncs that generator.weight_sync_* configure, with the restarts of engines and their number.

    Raises:
        ConfigError: An engine cannot take adapters apart from the model, pause as configured, or share memory.
    """
    cfg, learner = base.cfg, base.learner
    assert learner is not None
    publisher = WeightPublisher(
        learner.policy,
        lambda: client.engines,
        route=supported_route(cfg, client.engines, one_node=base.layout.one_node),
        folder=weight_folder(cfg),
        deadline_s=cfg.trainer.timeouts.weight_sync_s,
        probe=_probe(cfg, learner, _probe_ids(cfg, tokenizer, train_dataset)),
        rehearse_first=True,
        adapter_only=sends_adapter(cfg, client.engines),
    )
    seats = EngineSeats(cfg, base.cluster, base.layout) if base.layout.engines is not None else None
    supervisor = build_supervisor(base, client, publisher, seats)
    wanted = build_watch(cfg, base.directory, client, supervisor, seats)
    client.on_close(wanted.end)
    return SupervisedPublisher(
        learner,
        client,
        publisher,
        supervisor,
        wanted=wanted,
        mode=pause_mode(cfg, client.engines),
        time_shared=base.layout.time_shared,
    )


class SupervisedPublisher:
    """Publishes weights, and then restarts the engines that died since the last time, with the newest weights."""

    def __init__(
        self,
        learner: Learner,
        client: EngineClient,
        publisher: WeightPublisher,
        supervisor: EngineSupervisor,
        *,
        wanted: WantedEngines | None = None,
        mode: str | None = None,
        time_shared: bool = False,
    ):
        """Engines that die while they generate are restarted by `supervisor`, too.

        Args:
            wanted: Begins to change the number of engines after the first sync; None where nothing changes it.
            mode: How rollouts that go on during a sync are paused (see `pause_mode`), which is while weights are sent.
                They, and the trainer, go on while engines are restarted. None if there are no such rollouts.
            time_shared: Engines and learner take turns on the same slots.
        """
        self._learner = learner
        self._client = client
        self._publisher = publisher
        self._supervisor = supervisor
        self._wanted = wanted
        self._mode = mode
        self._time_shared = time_shared
        client.revive, client.revives_at_once = self._revive_while_generating, mode is not None

    async def publish(self, version: int) -> dict[str, float]:
        """Send the learner's weights as this version, restart dead engines, and return the metrics of both."""
        client, supervisor, mode = self._client, self._supervisor, self._mode
        async with nullcontext() if mode else client.held():
            before = supervisor.restarts
            async with supervisor.syncing():
                async with self._learner.at_rest(), client.paused(mode) if mode else nullcontext():
                    await self._publish_to_all(version)
            if mode and client.engines:  # they go on meanwhile
                client.revive_dead()
            elif mode:
                await client.revived()
            else:
                await supervisor.revive()
            if self._time_shared and supervisor.restarts > before:
                await client.sleep()
        # Those of the last sync: if a failed one was repeated, that is the one with the last engine.
        metrics = self._publisher.metrics | await client.metrics() | {"engines/restarts": float(supervisor.restarts)}
        idle, wasted = metrics.pop("engines/idle"), metrics.pop("engines/wasted_tokens")
        if self._wanted is not None:
            self._wanted.begin()
        return metrics | ({"async/engines_idle": idle, "async/wasted_tokens": wasted} if mode else {})

    async def release(self) -> None:
        """Change the number of engines no longer, and restart none: nothing takes part in calls of the ranks."""
        if self._wanted is not None:
            await self._wanted.end()
        await self._client.stop_reviving()

    async def _publish_to_all(self, version: int) -> None:
        """Publish to all engines; if some died in a failed sync, once more to each living one in turn.

        After a failed sync an engine may still hold rehearsal weights.
        """
        client = self._client
        alive = len(client.engines)
        try:
            if alive:
                await self._publisher.publish(version)
        except SkyRLError:
            await client.health()  # marks engines that do not answer as dead
            if len(client.engines) == alive:
                raise
            for engine in client.engines:
                try:
                    await self._publisher.publish_to(engine, version)
                except SkyRLError:
                    await client.health()
                    if engine in client.engines:
                        raise

    async def _revive_while_generating(self) -> None:
        await self._supervisor.revive()
        if self._time_shared:
            await self._learner.offload()
            await self._client.wake_up()


def build_supervisor(
    base: Services, client: EngineClient, publisher: WeightPublisher, seats: EngineSeats | None
) -> EngineSupervisor:
    """Restarts the run's own engines in their `seats`, and reconnects to engines that run elsewhere (None)."""
    cfg, learner = base.cfg, base.learner
    assert learner is not None
    one_memory = shares_memory(cfg)

    async def start(name: str, patient: bool) -> Any:
        client.kill(name)
        if seats is None:
            return await connect_engine(name, cfg)  # restarting a server is up to its operator
        if one_memory:
            await learner.offload()
        return await seats.start_again(name, cfg.trainer.timeouts.placement_s if patient else 0.0)

    async def sync(engine: Any) -> None:
        if one_memory:
            await engine.sleep()
            await learner.keep_weights()
            await engine.wake_up(["weights"])
        await send_whole_version(learner, publisher, engine)

    async def stop(engine: Any) -> None:
        await (engine.close() if seats is None else asyncio.to_thread(engine.kill))

    return EngineSupervisor(
        client,
        start=start,
        sync=sync,
        stop=stop,
        max_engine_restarts=cfg.generator.max_engine_restarts,
    )


async def send_whole_version(learner: Learner, publisher: WeightPublisher, engine: Any) -> None:
    """Sync one engine with the newest version, never with one in the making.

    Raises WorkerDied if that fails and a rank of the trainer does not answer, else what it failed with.
    """
    async with learner.at_rest() as version:
        try:
            await publisher.publish_to(engine, version)
        except SkyRLError as error:
            if not await learner.answers(ANSWER_S):
                raise WorkerDied(f"{type(error).__name__}: {error}") from error
            raise


# -- what the configuration and the engines decide


def supported_route(cfg: Config, engines: Sequence[Any], *, one_node: bool = True) -> str:
    """`weight_route`, or "checkpoint" (files) if that is chosen by itself and an engine does not support it.

    Raises ConfigError for shared memory that is configured, on a CPU, and policy and engines on several nodes.
    """
    if cfg.generator.weight_sync_route == "ipc" and cfg.device == "cpu" and not one_node:
        raise ConfigError(
            "generator.weight_sync_route=ipc: policy and engines are on several nodes, which share no memory; use "
            "auto, broadcast or checkpoint."
        )
    route = weight_route(cfg, one_node=one_node)
    if route != "broadcast" or cfg.generator.weight_sync_route != "auto":
        return route
    return route if all(route in one.capabilities.weight_routes for one in engines) else "checkpoint"


def sends_adapter(cfg: Config, engines: Sequence[Any]) -> bool:
    """Whether engines get adapters instead of merged weights.

    Raises ConfigError if that is required (lora.sync=adapter) and an engine cannot take them.
    """
    lora = cfg.trainer.policy.model.lora
    if not wants_adapter(cfg):
        return False
    unable = [one.capabilities for one in engines if one.capabilities.synced_adapter_rank < lora.rank]
    if unable and lora.sync == "adapter":
        most = unable[0].synced_adapter_rank
        can = f"takes ranks up to {most}" if most else unable[0].refusals.get("adapter", "takes none").rstrip(".")
        raise ConfigError(
            f"trainer.policy.model.lora.sync=adapter: engine {unable[0].name!r} cannot take an adapter of rank "
            f"{lora.rank} apart from its model: {can}. Set trainer.policy.model.lora.sync=merged."
        )
    return not unable


PAUSES = {"keep": "keep", "recompute": "retract", "abort": "abort"}
"""trainer.fully_async.on_sync -> how engines pause."""


def pause_mode(cfg: Config, engines: Sequence[Any]) -> str | None:
    """How requests under way are paused for a sync; None without fully_async, where there are none.

    Raises ConfigError if an engine cannot do that.
    """
    if not cfg.trainer.fully_async.enabled:
        return None
    chosen = cfg.trainer.fully_async.on_sync
    for one in engines:
        able = one.capabilities.pause_modes
        if PAUSES[chosen] not in able:
            can = ", ".join(name for name, mode in PAUSES.items() if mode in able) or "none of them"
            raise ConfigError(
                f"trainer.fully_async.on_sync={chosen}: engine {one.capabilities.name!r} cannot pause in this way; it "
                f"can: {can}."
            )
        if chosen == "abort" and not one.capabilities.seeds:
            log.warning(
                f"trainer.fully_async.on_sync=abort: engine {one.capabilities.name!r} takes no seeds, so that what a "
                "sync ends is another answer when it begins anew, and long ones become rarer. Set recompute, which "
                "keeps what there is."
            )
    return PAUSES[chosen]


def _probe_ids(cfg: Config, tokenizer: Any, train_dataset: PromptDataset) -> list[list[int]]:
    """Return the beginnings of the first training prompts as token ids."""
    kwargs, prompts = cfg.generator.chat_template_kwargs, train_dataset.prompts[:PROBE_SEQUENCES]
    rendered = (render_prompt(tokenizer, one.messages, template_kwargs_of(one.env_extras, kwargs)) for one in prompts)
    return [ids[:PROBE_TOKENS] for ids in rendered]


def _probe(cfg: Config, learner: Learner, probe_ids: Sequence[Sequence[int]]) -> Probe | None:
    """Of every sync if that is configured; otherwise of the first one, where half precision makes engines differ."""
    check, half = cfg.generator.weight_sync_check, cfg.trainer.bf16 or cfg.generator.model_dtype != "float32"
    token_ids = [ids for ids in probe_ids if len(ids) > 1]
    if not token_ids or (check != "probe" and (check == "off" or not half)):
        return None
    largest = HALF_PRECISION_PROBE_TOLERANCE if half else PROBE_TOLERANCE
    return Probe(
        token_ids=token_ids,
        trainer_score=partial(score_sequences, learner, learner.policy),
        tolerance=largest if check == "probe" else math.inf,
        mean_tolerance=HALF_PRECISION_MEAN_TOLERANCE if half else math.inf,
        every_sync=check == "probe",
        engines_alone=_engines_alone(learner) if shares_memory(cfg) else nullcontext,
    )


def _engines_alone(learner: Learner) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Inside, engines have the accelerators for themselves: to score they wake caches as large as all that is free."""

    @asynccontextmanager
    async def alone() -> AsyncIterator[None]:
        await learner.offload()
        try:
            yield
        finally:
            await learner.keep_weights()

    return alone


async def score_sequences(
    learner: Learner, group: WorkerGroup, token_ids: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The trainer's log-probs (nats) of all tokens but the first of each sequence, at temperature 1."""
    rows = [Demonstration(list(ids), [False] + [True] * (len(ids) - 1)) for ids in token_ids]
    batch = demonstration_batch(rows)
    values = (await learner.token_scores(group, batch)).tolist()
    offsets = batch.offsets.tolist()
    return [values[start + 1 : stop] for start, stop in pairwise(offsets)]
