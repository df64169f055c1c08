"""Part 3: the process group of weight transfers (NCCL on CUDA, gloo on a CPU) alone and with an absent peer."""

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


def address() -> str:
    return "{}:{}".format(*free_address())


def run(setting: Setting, report: Report) -> None:
    """Connect to a rank that hangs and to one that never comes, which must end by the deadline. Then connect alone.

    The hanging rank comes first, because NCCL's own deadline under test is that of a process's first group.
    """
    deadline = 2.0 if setting.toy else 10.0
    hangs = address()
    with ThreadPoolExecutor(1) as pool:
        store = pool.submit(comes_and_hangs, hangs)
        refused("a rank that comes, but never connects", hangs, setting.device, deadline, report)
        store.result()
    refused("a rank that never comes", address(), setting.device, deadline, report)
    alone(setting.device, report)


def comes_and_hangs(address: str) -> Any:
    """Run the steps of rank 1 before the backend connects, and stop. The store must live as long as the others wait."""
    host, _, port = address.rpartition(":")
    _wait_for_root(host, int(port), 30.0)
    store = _store(address, timedelta(seconds=30))
    store.set("rank 1", "")
    return store


def refused(name: str, address: str, device: str, deadline: float, report: Report) -> None:
    start = time.perf_counter()
    try:
        BroadcastGroup(address, ROOT_RANK, 2, device, deadline)
        report.note(name, "no error", "WeightSyncError", False)
    except WeightSyncError as error:
        report.note(name, str(error)[:160], "WeightSyncError")
    report.at_most("seconds until then", time.perf_counter() - start, deadline + SLACK_S, "s")


def alone(device: str, report: Report) -> None:
    start = time.perf_counter()
    group = BroadcastGroup(address(), ROOT_RANK, 1, device, 60.0)
    report.at_most("one rank connects", time.perf_counter() - start, 30.0, "s")
    sent = torch.arange(1 << 16, device=device)
    group.broadcast(sent)
    unchanged = torch.equal(sent.cpu(), torch.arange(1 << 16))
    report.note("its broadcast leaves the tensor as it was", unchanged, "True", unchanged)
    start = time.perf_counter()
    group.close()
    report.at_most("it leaves", time.perf_counter() - start, SLACK_S, "s")
