"""Starts an engine in a Ray actor for one wrapper or worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.placement import locate_gpus, reserve_pool, visible_devices
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.choices import ENGINES_IN_CHILD_PROCESSES
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.tensordict.wrappers.event_loop import call

_PLACED_S = 60.0


def engine_in_actor(
    target: str,
    options: Mapping[str, Any],
    *,
    name: str,
    ranks: int = 1,
    devices: Sequence[str] | None = None,
    start_ray: bool = False,
    deadline_s: float = 600.0,
) -> tuple[Any, Callable[[], None]]:
    """Start an engine in a Ray actor; return it once its model is loaded, and a function that frees its resources.

    Args:
        target: The engine's class as "module:Class".
        options: Arguments of the class. Without "device", the engine uses accelerators if Ray has any.
        name: Name of the engine in messages.
        ranks: Number of accelerators that the engine uses.
        devices: Accelerators, as in CUDA_VISIBLE_DEVICES, that Ray's choice must equal. None: no check.
        start_ray: Start Ray if it is not running.
        deadline_s: Seconds for loading the model.

    Raises:
        RuntimeError: If Ray is not running and `start_ray` is False.
        ConfigError: If Ray lacks the resources, or assigns other accelerators than `devices`.
    """
    cluster = Cluster()
    if not cluster.is_connected and not start_ray:
        raise RuntimeError("Ray is not started: call ray.init() first, or pass make_ray_worker=False.")
    cluster.connect()
    try:
        device = options.get("device") or ("cuda" if cluster.num_gpus else "cpu")
        on_gpu = device != "cpu"
        kind, count = ("cuda", ranks) if on_gpu else ("cpu", 1)
        placing: dict[str, Any] = {"deadline_s": _PLACED_S, "key": name}
        slots = reserve_pool(cluster, count=count, actors_per_slot=1, device=kind, total_slots=ranks, **placing)
        visible = None
        if on_gpu and (devices is not None or ranks > 1):
            places = call(locate_gpus(slots, range(ranks), _PLACED_S), "the engine's accelerators", _PLACED_S + 5.0)
            visible = visible_devices(places, name)
            if devices is not None and set(devices) != set(visible.split(",")):
                raise ConfigError(
                    f"{name}: devices={','.join(devices)}, but Ray has given it {visible}. Give "
                    f"num_devices={ranks} and let Ray choose, or start it in this process: make_ray_worker=False."
                )
        engine = spawn(
            cluster,
            target,
            {**options, "device": device},
            pool=slots,
            index=0,
            name=name,
            is_async=True,
            deadline_s=deadline_s,
            death_error=EngineError,
            devices=visible,
            in_child_process=target in ENGINES_IN_CHILD_PROCESSES,
        )
        known = call(engine.get_attribute("capabilities", deadline_s), f"starting {name}", deadline_s + 5.0)
        engine.cache_attributes(capabilities=known)
    except BaseException:
        cluster.__exit__(None, None, None)
        raise
    return engine, lambda: cluster.__exit__(None, None, None)
