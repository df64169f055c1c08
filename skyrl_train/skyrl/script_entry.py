"""What a script of SkyRL's does before its run: check the configuration that Hydra composed, and start Ray."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from skyrl_train.cluster.driver_store import cluster_has_gpus
from skyrl_train.config.hydra import compose, to_dict
from skyrl_train.config.predicates import RunComponents, count_run_slots, max_sequence_length
from skyrl_train.config.prepare import prepare_composed, read_command_line
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.redaction import redact
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import worker_imports
from skyrl_train.terminal import print_stderr

_LOG_FLUSH_S = 1.0
"""Within which Ray brings what a task printed last."""
_clusters: list[Any] = []
"""Ray as this program started it, until the program ends."""


def to_config(cfg: Config | DictConfig, components: RunComponents | None = None) -> Config:
    """The checked, frozen configuration of one that Hydra composed. Raises ConfigError that lists every problem.

    `uses`: the parts that must exist on this machine; None looks for nothing.
    """
    if isinstance(cfg, Config):
        return cfg
    # A task has no accelerator of its own, and where it runs need not be where ranks and engines do.
    there = True if cluster_has_gpus() else None
    return prepare_composed(cfg, components, has_accelerator=there).config


def to_dictconfig(config: Config) -> DictConfig:
    """A checked configuration as scripts read it: by attribute, a program's own keys among the others."""
    cfg = OmegaConf.create(to_dict(config))
    for section in (cfg.generator, cfg.environment, cfg.environment.skyrl_gym):
        own = section.pop("own")
        for name, value in own.items():
            section[name] = OmegaConf.merge(section[name], value) if name in section else value
        section["own"] = own
    return cfg


class SkyRLTrainConfig:
    """The name by which today's SkyRL programs compose their configuration."""

    @staticmethod
    def from_cli_overrides(args: Sequence[str]) -> DictConfig:
        """Compose the configuration of `key=value` arguments, as `@hydra.main` would.

        Keys of the program's own, below `generator` and `environment`, are added with a plus. What is wrong with the
        arguments is printed, all of it, and the program exits with status 2.
        """
        line = read_command_line(args)
        try:
            raise_problems(line.problems)
            cfg = compose(line.overrides, line.flags["config_name"], line.flags["config_dir"])
        except ConfigError as error:
            print_stderr(redact(str(error)))
            sys.exit(2)
        with open_dict(cfg):
            cfg.pop("hydra")
            for section in (cfg.generator, cfg.environment, cfg.environment.skyrl_gym):
                section.merge_with(section.pop("own", {}))  # where the program reads them
        return cfg


def validate_cfg(cfg: DictConfig) -> None:
    """Look for everything that is wrong with a configuration; notes and warnings go to stderr.

    What is wrong is printed, all of it, and the program exits with status 2, as every entrypoint does. Files and models
    are looked for when the experiment is made, which may have data of its own. Sets trainer.algorithm.max_seq_len if it
    is null, as losses may read it, and `device`.
    """
    try:
        prepared = prepare_composed(cfg)
    except ConfigError as error:
        print_stderr(redact(str(error)))
        sys.exit(2)
    for text in prepared.notes:
        print_stderr(f"note: {text}")
    for text in prepared.warnings:
        print_stderr(f"warning: {redact(text)}")
    cfg.device = prepared.config.device  # a task may run where there is no accelerator to be seen
    if cfg.trainer.algorithm.max_seq_len is None:
        cfg.trainer.algorithm.max_seq_len = max_sequence_length(prepared.config.generator)


def _disconnect(cluster: Any) -> None:
    time.sleep(_LOG_FLUSH_S)
    cluster.__exit__(None, None, None)


def initialize_ray(cfg: DictConfig) -> None:
    """Start Ray, or join the cluster at RAY_ADDRESS, until this program ends.

    Tasks that it starts find what it has registered: losses, estimators, environments. To be called in the main thread.
    """
    from skyrl_train.cluster.ray_cluster import Cluster
    from skyrl_train.skyrl.registries import sync_registries

    config, components = to_config(cfg), RunComponents()
    if not _clusters:
        cluster = Cluster(
            config.trainer.plugins,
            num_actors=count_run_slots(config, components).processes,
            preload=worker_imports(config, components),
        )
        cluster.connect()
        _clusters.append(cluster)
        atexit.register(_disconnect, cluster)
    sync_registries()
