"""Part 3: the process group of weight transfers (NCCL on CUDA, gloo on a CPU), alone and with a missing peer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from skyrl_train.cluster.addresses import free_address
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.broadcast import ROOT_RANK, BroadcastGroup, _store, _wait_for_root
from tests.gpu_check.report import Report, Setting

SLACK_S = 3.0
"""Seconds after its deadline within which a call must end."""


def loopback_address() -> str:
    return "{}:{}".format(*free_address())


def run(setting: Setting, report: Report) -> None:
    """Check that connecting to a hanging and to a missing rank ends by the deadline, and that a single rank connects.

    The hanging rank is checked first, because NCCL reads its own deadline only for the first group of a process.
    """
    deadline = 2.0 if setting.toy else 10.0
    hanging_address = loopback_address()
    with ThreadPoolExecutor(1) as pool:
        store = pool.submit(start_and_hang, hanging_address)
        check_deadline("a rank that starts but never connects", hanging_address, setting.device, deadline, report)
        store.result()
    check_deadline("a rank that never starts", loopback_address(), setting.device, deadline, report)
    check_single_rank(setting.device, report)


def start_and_hang(address: str) -> Any:
    """Run the steps of rank 1 until the backend would connect.

    Returns:
        The store. The caller must keep it as long as the other rank waits.
    """
    host, _, port = address.rpartition(":")
    _wait_for_root(host, int(port), 30.0)
    store = _store(address, timedelta(seconds=30))
    store.set("rank 1", "")
    return store


def check_deadline(name: str, address: str, device: str, deadline: float, report: Report) -> None:
    start = time.perf_counter()
    try:
        BroadcastGroup(address, ROOT_RANK, 2, device, deadline)
        report.note(name, "no error", "WeightSyncError", False)
    except WeightSyncError as error:
        report.note(name, str(error)[:160], "WeightSyncError")
    report.at_most("seconds until this error", time.perf_counter() - start, deadline + SLACK_S, "s")


def check_single_rank(device: str, report: Report) -> None:
    start = time.perf_counter()
    group = BroadcastGroup(loopback_address(), ROOT_RANK, 1, device, 60.0)
    report.at_most("connecting a single rank", time.perf_counter() - start, 30.0, "s")
    sent = torch.arange(1 << 16, device=device)
    group.broadcast(sent)
    unchanged = torch.equal(sent.cpu(), torch.arange(1 << 16))
    report.note("a broadcast of the single rank leaves the tensor unchanged", unchanged, "True", unchanged)
    start = time.perf_counter()
    group.close()
    report.at_most("closing the group", time.perf_counter() - start, SLACK_S, "s")
