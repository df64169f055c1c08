"""An engine in a Ray actor, for one wrapper or worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.placement import places_of, reserve, visible_devices
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.errors import EngineError
from skyrl_train.policies.loop import call

_PLACED_S = 60.0


def engine_in_actor(
    target: str,
    options: Mapping[str, Any],
    *,
    name: str,
    ranks: int = 1,
    devices: Sequence[int] | None = None,
    start_ray: bool = False,
    deadline_s: float = 600.0,
) -> tuple[Any, Callable[[], None]]:
    """ "module:Class"(**options) in a process of its own, once it is loaded, and what gives its place back.

    `ranks`: accelerators that it uses, one slot each; `devices`: those of this machine. Ray must have been started,
    else RuntimeError, unless `start_ray`: it ends with the engine then. ConfigError where there is no place.
    """
    cluster = Cluster()
    if not cluster.connected and not start_ray:
        raise RuntimeError("Ray is not started: call ray.init() first, or pass make_ray_worker=False.")
    cluster.connect()
    try:
        device = "cuda" if cluster.gpus else "cpu"
        slots = reserve(
            cluster,
            count=ranks if device == "cuda" else 1,
            tenants=1,
            device=device,
            total_slots=ranks,
            deadline_s=_PLACED_S,
            key=name,
        )
        visible = None if devices is None or device == "cpu" else ",".join(map(str, devices))
        if visible is None and device == "cuda" and ranks > 1:
            places = call(places_of(slots, range(ranks), _PLACED_S), "the engine's accelerators", _PLACED_S + 5.0)
            visible = visible_devices(places, name)
        engine = spawn(
            cluster,
            target,
            {"device": device, **options},
            slots=slots,
            index=0,
            name=name,
            concurrent=True,
            deadline_s=deadline_s,
            died=EngineError,
            devices=visible,
        )
        known = call(engine.read("capabilities", deadline_s), f"starting {name}", deadline_s + 5.0)
        engine.know(capabilities=known)
    except BaseException:
        cluster.__exit__(None, None, None)
        raise
    return engine, lambda: cluster.__exit__(None, None, None)
