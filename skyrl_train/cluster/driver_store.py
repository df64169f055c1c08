"""What a Ray task knows of the program that started it: bytes that it left by name; and whether there are GPUs."""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

_NAMESPACE = b"skyrl_train"


def is_connected_to_ray() -> bool:
    """Whether this process is connected to Ray, as the program or as one of its tasks."""
    return bool(ray.is_initialized())


def cluster_has_gpus() -> bool:
    """A task without a GPU of its own sees none, wherever ranks and engines will be."""
    return is_connected_to_ray() and ray.cluster_resources().get("GPU", 0.0) > 0


def put_for_tasks(name: str, value: bytes) -> None:
    """Replace what was left under that name. It stays in the cluster; other jobs do not find it."""
    internal_kv._internal_kv_put(_key(name), value, overwrite=True, namespace=_NAMESPACE)


def get_from_driver(name: str) -> bytes | None:
    """What the program whose job this process belongs to has left; None without any, or without Ray."""
    if not is_connected_to_ray():
        return None
    found: bytes | None = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return found


def _key(name: str) -> bytes:
    return f"{ray.get_runtime_context().get_job_id()}: {name}".encode()
