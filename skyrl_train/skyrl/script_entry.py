"""Functions that SkyRL's scripts call before a run: they validate the composed configuration and start Ray."""

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
"""Time in which Ray forwards the last output of a task, in seconds."""
_clusters: list[Any] = []
"""The Ray connection of this program; it stays open until the program ends."""


def to_config(cfg: Config | DictConfig, components: RunComponents | None = None) -> Config:
    """Validate a composed configuration and return it as a frozen Config. A Config is returned unchanged.

    Args:
        cfg: The configuration that Hydra composed.
        components: The parts of the run whose files and packages must exist on this machine; None skips these checks.

    Raises:
        ConfigError: The configuration is not valid; the message lists every problem.
    """
    if isinstance(cfg, Config):
        return cfg
    # A task has no accelerator of its own, and ranks and engines may run on other nodes than the task.
    has_accelerator = True if cluster_has_gpus() else None
    return prepare_composed(cfg, components, has_accelerator=has_accelerator).config


def to_dictconfig(config: Config) -> DictConfig:
    """Return a validated configuration as a DictConfig, with the program's own keys merged into their sections."""
    cfg = OmegaConf.create(to_dict(config))
    for section in (cfg.generator, cfg.environment, cfg.environment.skyrl_gym):
        custom_keys = section.pop("own")
        for name, value in custom_keys.items():
            section[name] = OmegaConf.merge(section[name], value) if name in section else value
        section["own"] = custom_keys
    return cfg


class SkyRLTrainConfig:
    """The class through which programs for newer versions of SkyRL compose their configuration."""

    @staticmethod
    def from_cli_overrides(args: Sequence[str]) -> DictConfig:
        """Compose the configuration from `key=value` arguments, as `@hydra.main` would.

        The program may add its own keys below `generator` and `environment`, with a leading plus. If arguments are not
        valid, this prints every problem to stderr and exits the program with status 2.
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
                section.merge_with(section.pop("own", {}))  # programs read their own keys from the section itself
        return cfg


def validate_cfg(cfg: DictConfig) -> None:
    """Validate a configuration, and print notes and warnings to stderr.

    If the configuration is not valid, this prints every problem to stderr and exits the program with status 2, as every
    entrypoint does. It does not look for files and models: the experiment does, which may have its own data. Sets
    `cfg.device`, and `trainer.algorithm.max_seq_len` if it is null, because losses may read it.
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
    cfg.device = prepared.config.device  # the run's Ray task may see no accelerator
    if cfg.trainer.algorithm.max_seq_len is None:
        cfg.trainer.algorithm.max_seq_len = max_sequence_length(prepared.config.generator)


def _disconnect(cluster: Any) -> None:
    time.sleep(_LOG_FLUSH_S)
    cluster.__exit__(None, None, None)


def initialize_ray(cfg: DictConfig) -> None:
    """Start Ray, or connect to the cluster at RAY_ADDRESS, and disconnect when this program ends.

    Ray tasks of this program can use the losses, estimators and environments that it has registered. Call this in the
    main thread. A second call only publishes new registrations.

    Raises:
        ConfigError: The configuration is not valid, or a registered item cannot be sent to Ray tasks.
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
