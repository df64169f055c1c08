"""A collector in a Ray actor: the driver's end and the actor's end."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import cloudpickle
from tensordict import TensorDictBase
from torchrl.collectors.llm import RayLLMCollector as TorchRLRayCollector

from skyrl_train.cluster.actors import ActorProxy, spawn_unpinned
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.tensordict.collectors.delivery import Delivery, TorchRLCollector
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector, check_settings
from skyrl_train.tensordict.envs.versions import Version
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.weight_sync import Source, weights_of


class RayLLMCollector(Delivery, TorchRLRayCollector):  # type: ignore[misc]
    """An LLMCollector whose environment and policy are in a Ray actor. Its arguments are the same, except:

    - env, policy_factory, weight_updater: functions that are called in the actor, where engines are made; their
      closures are pickled. `policy` must be picklable.
    - dialog_turns_per_batch is required.
    - replay_buffer, queue, postproc: belong to this process, where batches arrive.
    - sync_iter: True begins a batch when it is requested, so that the newest weights sample it. False begins the next
      one when a batch is returned: with one update per batch, none is older than one update.
    - ray_init_config: arguments of `ray.init`, if Ray is not running. remote_config: options of the actor
      (`ray.remote`'s), to which `num_cpus` (1) and `num_gpus` (0) are added.
    - timeout: seconds for a batch, and for every other wait.

    Close it: `shutdown` ends everything that it started, including Ray. A Ray task may get the collector: batches of
    its copy arrive in the task, which has no buffer or queue, and it pushes weights to the same actor.
    """

    def __init__(
        self,
        env: Callable[[], Any],
        *,
        sync_iter: bool = True,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        **settings: Any,
    ):
        bound = inspect.signature(LLMCollector).bind(env, **settings)  # TypeError for an unknown argument
        bound.apply_defaults()
        settings, self.postproc = bound.arguments, bound.arguments.pop("postproc")
        buffer, queue = settings.pop("replay_buffer"), settings.pop("queue")
        self.deliver_to(buffer, queue, settings["max_staleness"], settings["timeout"])
        check_settings(settings)
        if hasattr(env, "reset") or not callable(env):
            raise ConfigError(
                f"RayLLMCollector makes its environment in the actor: env must be a function, not {env!r:.80}."
            )
        if settings["dialog_turns_per_batch"] is None:
            raise ConfigError("RayLLMCollector needs dialog_turns_per_batch, an integer of at least 1.")
        if self.max_staleness == 0 and not sync_iter:
            raise ConfigError("sync_iter=False collects one batch ahead: max_staleness must be at least 1.")
        if settings["flatten_data"] is None and not settings["yield_completed_trajectories"]:
            settings["flatten_data"] = buffer is not None
        total = settings["total_dialog_turns"]
        self.total_frames: float = float("inf") if total < 0 else total
        self.requested_frames_per_batch: int = settings["dialog_turns_per_batch"]
        self.sync_iter = sync_iter
        options = {"num_cpus": 1, "num_gpus": 0, **(remote_config or {})}
        given = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        options |= {name: value for name, value in given.items() if value is not None}
        self._cluster = Cluster(settings=ray_init_config)
        self._cluster.connect()
        try:
            self._actor = self._start_actor(settings, options)
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise

    dialog_turns_per_batch = TorchRLCollector.dialog_turns_per_batch  # as given; the actor's may be rounded up
    total_dialog_turns = TorchRLCollector.total_dialog_turns

    def __getstate__(self) -> dict[str, Any]:
        own = ("_cluster", "_stopping", "_collecting", "replay_buffer", "queue")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.deliver_to(None, None, state["max_staleness"], state["timeout"])
        self.__dict__.update(state)
        self._cluster = Cluster()  # Ray is the original's

    # -- policy and versions ----------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> Version:
        """Version of the policy in the actor. Raises RuntimeError after `shutdown`."""
        self._check_open()
        version: Version = self._ask("get_policy_version")
        return version

    @property
    def weight_updater(self) -> Any:
        """None: the updater is in the actor, which takes it from the argument `weight_updater`."""
        return None

    def init_updater(self, *args: Any, **options: Any) -> None:
        """Call the updater's `init` in the actor."""
        self._check_open()
        self._ask("init_updater", *args, **options)

    def increment_version(self) -> None:
        """Record that the policy has new weights; an updater calls it itself."""
        self._check_open()
        self._ask("increment_version")

    def _push(self, weights: Source | None, worker_ids: Any) -> None:
        tensors = None if weights is None else {name: tensor.cpu() for name, tensor in weights_of(weights).items()}
        self._ask("update_policy_weights_", tensors, worker_ids=worker_ids)

    # -- batches ------------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """Return one batch without delivering it, or None after the last one.

        Raises DeadlineExceeded if the actor takes longer than `timeout`, WorkerDied if it has died.
        """
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        ahead = not self.sync_iter and not self.is_running()  # the thread of `start` already works ahead
        batch: TensorDictBase | None = self._ask("take", ahead, self._ahead)
        return batch

    def _updates(self) -> int:
        return int(self._ask("_updates"))

    def _interrupt(self) -> None:
        super()._interrupt()
        self._end("stop")

    # -- the actor ----------------------------------------------------------------------------------------------------

    def _start_actor(self, settings: dict[str, Any], options: dict[str, Any]) -> ActorProxy:
        target = f"{_Hosted.__module__}:{_Hosted.__name__}"
        try:
            name, arguments = "the collector's actor", {"settings": settings}
            actor = spawn_unpinned(
                self._cluster, target, arguments, options=options, name=name, deadline_s=self.timeout
            )
        except TypeError as error:  # Ray's, with a long text about what cannot be pickled
            key = next((name for name, value in settings.items() if not _can_be_pickled(value)), "env")
            kind, instead = type(settings[key]).__name__, "policy_factory" if key == "policy" else key
            raise ConfigError(
                f"RayLLMCollector: {key} ({kind}) cannot be pickled for the actor ({str(error).splitlines()[0]}). "
                f"Give {instead}, a function that makes it there."
            ) from error
        call(actor.get_attribute("ready", self.timeout), "the start of the collector's actor", self.timeout + 5.0)
        return actor

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        work = getattr(self._actor, method)(*args, **options)
        return call(work, f"the collector's actor ({method})", self.timeout + 5.0)

    def _end(self, method: str, *args: Any) -> None:
        """Call a method of the actor at the end; ignore an actor that is gone or hangs."""
        with suppress(SkyRLError):
            self._ask(method, *args)

    def _release(self, close_env: bool) -> None:
        with ExitStack() as ending:  # runs all of them, even if one raises
            ending.callback(self._cluster.__exit__, None, None, None)
            self._end("shutdown", None, close_env)


def _can_be_pickled(value: Any) -> bool:
    with suppress(Exception):
        return bool(cloudpickle.dumps(value))
    return False


class _Hosted:
    """The actor's end of the collector. It makes batches in threads, so that it can answer other calls meanwhile."""

    ready = True

    def __init__(self, settings: dict[str, Any]):
        self._collector = LLMCollector(**settings)
        self._next: asyncio.Future[Any] | None = None

    async def take(self, begin_next: bool, trained_at: int | None) -> TensorDictBase | None:
        """Return a batch, begun now unless it was begun before; `trained_at`: number of updates before its training."""
        if self._next is None:
            self._next = self._begin(trained_at)
        coming = self._next
        try:
            batch: TensorDictBase | None = await asyncio.shield(coming)  # a cancelled call leaves it to the next one
        finally:
            if self._next is coming and coming.done():
                self._next = None
        if begin_next and batch is not None and self._next is None:
            self._next = self._begin(self._collector._updates() + 1)
        return batch

    def _begin(self, trained_at: int | None) -> asyncio.Future[Any]:
        self._collector._ahead = trained_at
        return asyncio.ensure_future(asyncio.to_thread(self._collector.rollout))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a method of the collector that runs in a thread."""
        return functools.partial(asyncio.to_thread, getattr(self._collector, method))

    async def stop(self) -> None:
        """End the current batch after its turn."""
        self._collector._interrupt()
        if self._next is not None:
            await asyncio.wait([self._next])
