"""What a program leaves in its Ray cluster for tasks that it starts: bytes by name, for as long as its job lives."""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

_NAMESPACE = b"skyrl_train"


def leave_for_tasks(name: str, value: bytes) -> None:
    """Replace what was left under that name. Needs a connection to Ray."""
    internal_kv._internal_kv_put(_key(name), value, overwrite=True, namespace=_NAMESPACE)


def left_by_program(name: str) -> bytes | None:
    """What the program whose job this process belongs to has left; None without any, or without Ray."""
    if not ray.is_initialized():
        return None
    found: bytes | None = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
    return found


def _key(name: str) -> bytes:
    return f"{ray.get_runtime_context().get_job_id()}: {name}".encode()
