"""Which nodes of a run use which of its paths."""

from __future__ import annotations

import os
from collections.abc import Iterator

from skyrl_train.assembly.engines import weight_folder
from skyrl_train.assembly.layout import Layout, RoleSlots
from skyrl_train.cluster.paths import SharedPath
from skyrl_train.config.schema import Config
from skyrl_train.config.sources import local_path
from skyrl_train.storage.places import working_folder


def shared_paths(cfg: Config, layout: Layout) -> Iterator[SharedPath]:
    """Models, checkpoints, exports and the folder for weights, with the nodes of the roles that use them.

    The folders that are written to are made, as the run would make them later.
    """
    trainer, generator = cfg.trainer, cfg.generator
    for role, slots in (("policy", layout.policy), ("ref", layout.reference), ("critic", layout.critic)):
        path = getattr(trainer, role).model.path
        if slots is not None and path is not None:
            yield SharedPath(f"trainer.{role}.model.path", local_path(path), _nodes(slots))
    if layout.reward is not None and trainer.reward.model.path is not None:
        yield SharedPath("trainer.reward.model.path", local_path(trainer.reward.model.path), _nodes(layout.reward))
    if layout.engines is not None:
        yield SharedPath("generator.model_name", local_path(generator.model_name), _nodes(layout.engines))
    if layout.policy is None:
        return
    trained = _nodes(layout.policy) | _nodes(layout.critic)
    if trainer.resume_mode == "from_path" and trainer.resume_path:
        yield SharedPath("trainer.resume_path", trainer.resume_path, trained)
    if trainer.ckpt_interval > 0:
        yield from _written("trainer.ckpt_path", trainer.ckpt_path, trained)
    if trainer.hf_save_interval > 0:
        yield from _written("trainer.export_path", trainer.export_path, trained)
    if generator.weight_sync_route == "checkpoint" and layout.engines is not None:
        key = "generator.weight_sync_folder"
        yield from _written(key, weight_folder(cfg), _nodes(layout.policy) | _nodes(layout.engines))


def _nodes(slots: RoleSlots | None) -> frozenset[str]:
    return frozenset() if slots is None else frozenset(slots.slots.nodes)


def _written(key: str, path: str, nodes: frozenset[str]) -> Iterator[SharedPath]:
    folder = working_folder(path).absolute()  # of an address the folder that ranks write to before it is uploaded
    os.makedirs(folder, exist_ok=True)
    yield SharedPath(key, str(folder), nodes, written=True)
