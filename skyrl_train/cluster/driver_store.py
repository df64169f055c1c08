"""A key-value store through which the driver passes bytes to its Ray tasks, and a check for GPUs in the cluster."""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

_NAMESPACE = b"skyrl_train"


def is_connected_to_ray() -> bool:
    """Return True if this process is connected to Ray, as a driver or as a worker."""
    return bool(ray.is_initialized())


def cluster_has_gpus() -> bool:
    """Return True if this process is connected to Ray and the cluster has GPUs. A task without a GPU of its own sees
    none.
    """
    return is_connected_to_ray() and ray.cluster_resources().get("GPU", 0.0) > 0


def put_for_tasks(name: str, value: bytes) -> None:
    """Store bytes for the tasks of this Ray job, replacing an earlier value of the same name.

    The value stays in the cluster's store. Other jobs cannot see it.
    """
    internal_kv._internal_kv_put(_key(name), value, overwrite=True, namespace=_NAMESPACE)


def get_from_driver(name: str) -> bytes | None:
    """Return the bytes that the driver of this process's Ray job stored under a name.

    Returns None if there are none, or if this process is not connected to Ray.
    """
    if not is_connected_to_ray():
        return None
    value: bytes | None = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return value


def _key(name: str) -> bytes:
    return f"{ray.get_runtime_context().get_job_id()}: {name}".encode()
