"""Facts about the cluster at RAY_ADDRESS and the submitted Ray job, known before this process joins the cluster."""

from __future__ import annotations

import os
import subprocess
import sys

QUERY_TIMEOUT_S = 20.0
"""Limit of a query. An answer takes a second; Ray itself looks for an absent cluster for 40 s."""
MIN_JOB_GRACE_S = 60.0
"""Seconds that a run may need to end cleanly: ranks have 30 s to answer, then the last step is saved."""
_RAY_DEFAULT_GRACE_S = 3
_QUERY_SCRIPT = """
import sys
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient
nodes = GcsClient(address=canonicalize_bootstrap_address_or_die(sys.argv[1])).get_all_node_info(timeout=10)
print("GPUs", sum(node.resources_total.get("GPU", 0.0) for node in nodes.values() if node.state == 0))
"""


def external_cluster_address() -> str | None:
    """Return the value of RAY_ADDRESS if it names a running cluster, else None."""
    address = os.environ.get("RAY_ADDRESS")
    return None if address in (None, "", "local") else address


def external_cluster_has_gpus() -> bool | None:
    """Return True if live nodes of the cluster at RAY_ADDRESS have GPUs, regardless of this machine.

    Blocks for up to 20 s. The query runs in a child process, because a wrong token ends the process that uses it.

    Returns:
        None if RAY_ADDRESS names no cluster, if it is a URL such as `ray://`, or if the cluster does not answer.
    """
    address = external_cluster_address()
    if address is None or "://" in address:
        return None
    try:
        query = subprocess.run(
            [sys.executable, "-c", _QUERY_SCRIPT, address],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    counts = [line.split()[1] for line in query.stdout.splitlines() if line.startswith("GPUs ")]
    return float(counts[0]) > 0 if query.returncode == 0 and counts else None


def short_job_grace_warning() -> str | None:
    """Return a warning if `ray job stop` would kill this job before its last step is saved.

    Ray's job supervisor waits between SIGTERM and SIGKILL; its environment, which the job inherits, says how long.

    Returns:
        The warning with the variable to set, or None if the time suffices or this is not a submitted job.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return None
    try:
        seconds = int(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _RAY_DEFAULT_GRACE_S))
    except ValueError:
        seconds = 0  # Ray fails on such a value when the job is stopped
    if seconds >= MIN_JOB_GRACE_S:
        return None
    return (
        f"`ray job stop` kills this job {seconds} s after it sends SIGTERM, so the last step may not be saved. "
        'Submit the job with --runtime-env-json \'{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}\'.'
    )
