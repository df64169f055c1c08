"""Where a run's environments are: processes beside the driver, or in hosts on nodes of the cluster."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from skyrl_train.assembly.environments import build_environments, host_settings
from skyrl_train.cluster.actors import Remote, spawn
from skyrl_train.cluster.placement import reserve_spread
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.schema import Config
from skyrl_train.environments.hosts import EnvironmentHosts
from skyrl_train.environments.own_classes import pack_own
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.report.logs import log_of_environments
from skyrl_train.report.phases import phase

SERVER = "skyrl_train.environments.hosts:HostServer"


@asynccontextmanager
async def environments_of_run(cfg: Config, cluster: Cluster, directory: Path) -> AsyncIterator[EnvironmentPool]:
    """Inside, environments run. `directory`: the run's folder.

    Raises ConfigError for hosts that find no room, and EnvironmentHostsLost for those that do not start.
    """
    log = log_of_environments(directory.absolute())
    if not cfg.environment.hosts:
        async with build_environments(cfg, log) as host:
            yield host
        return
    pool = build_hosts(cfg, cluster, log)
    with phase("environments", f"{cfg.environment.hosts} hosts on nodes of the cluster"):
        await pool.__aenter__()
    try:
        yield pool
    finally:
        await pool.close()


def build_hosts(cfg: Config, cluster: Cluster, log: Path) -> EnvironmentHosts:
    """Reserve room for environment.hosts; they start with the `async with` of what is returned."""
    environment, timeouts = cfg.environment, cfg.trainer.timeouts
    slots = reserve_spread(
        cluster,
        count=environment.hosts,
        cpus=environment.host_cpus,
        resources=environment.host_resources,
        deadline_s=timeouts.placement_s,
        key=f"environment.hosts={environment.hosts}",
    )
    settings = host_settings(cfg, log)
    settings["max_env_workers"] = max(1, min(settings["max_env_workers"], int(2 * environment.host_cpus)))
    settings |= {"path": [entry or os.getcwd() for entry in sys.path], "checks": True}

    def start(index: int) -> Remote:
        return spawn(
            cluster,
            SERVER,
            {**settings, "own": pack_own()},
            slots=slots,
            index=index,
            name=f"environment host {index}",
            concurrent=True,
            deadline_s=math.inf,
            apart=True,
        )

    return EnvironmentHosts(environment.hosts, start, deadline_s=timeouts.environment_hosts_s)
