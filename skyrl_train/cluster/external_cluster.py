"""What is known of the cluster that RAY_ADDRESS names before this process joins it, and of the job that it may be."""

from __future__ import annotations

import os
import subprocess
import sys

QUERY_TIMEOUT_S = 20.0
"""An answer takes a second; a cluster that is not there, Ray looks for 40 s long."""
MIN_JOB_GRACE_S = 60.0
"""Seconds that a run may need to end well: ranks have 30 s to answer, then the last step is saved."""
_RAY_DEFAULT_GRACE_S = 3
_QUERY_SCRIPT = """
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
nodes = GcsClient(address=canonicalize_bootstrap_address_or_die(sys.argv[1])).get_all_node_info(timeout=10)
print("GPUs", sum(node.resources_total.get("GPU", 0.0) for node in nodes.values() if node.state == 0))
"""


def external_cluster_address() -> str | None:
    """The value of RAY_ADDRESS if it names a cluster that somebody else has started."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def external_cluster_has_gpus() -> bool | None:
    """Whether living nodes of the named cluster have GPUs, whatever this machine has; None if nobody answers.

    Asked by a process of its own: a wrong token ends the process that uses it.
    """
    address = external_cluster_address()
    if address is None or "://" in address:
        return None
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _QUERY_SCRIPT, address],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    counts = [line.split()[1] for line in asked.stdout.splitlines() if line.startswith("GPUs ")]
    return float(counts[0]) > 0 if asked.returncode == 0 and counts else None


def short_job_grace_warning() -> str | None:
    """What to say in a submitted job that `ray job stop` would kill before its last step is saved; else None.

    Ray's job supervisor, whose environment its job inherits, reads how long it waits between SIGTERM and SIGKILL.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return None
    try:
        seconds = int(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _RAY_DEFAULT_GRACE_S))
    except ValueError:
        seconds = 0  # Ray reads it when the job is stopped, and fails
    if seconds >= MIN_JOB_GRACE_S:
        return None
    return (
        f"`ray job stop` kills this job {seconds} s after it has asked it to end: the last step may not be saved. "
        'Submit it with --runtime-env-json \'{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}\'.'
    )
