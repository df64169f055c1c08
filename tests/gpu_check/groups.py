"""Part 3: the weight transfer's own process group, NCCL on CUDA, gloo on a CPU: alone, and with nobody."""

from __future__ import annotations

import time

import torch

from skyrl_train.cluster.sockets import free_address
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.transport import ROOT, BroadcastGroup
from tests.gpu_check.report import Report, Setting

SLACK_S = 3.0
"""How much later than its deadline a call may end."""


def address() -> str:
    return "{}:{}".format(*free_address())


def run(setting: Setting, report: Report) -> None:
    """Connect alone, broadcast, leave; then connect to nobody, which must end by its deadline; then connect again."""
    alone(setting.device, report)
    deadline = 2.0 if setting.toy else 10.0
    start = time.perf_counter()
    try:
        BroadcastGroup(address(), ROOT, 2, setting.device, deadline)
        report.note("a rank that never comes", "no error", "WeightSyncError", False)
    except WeightSyncError as error:
        report.note("a rank that never comes", str(error)[:160], "WeightSyncError")
    report.at_most("seconds until then", time.perf_counter() - start, deadline + SLACK_S, "s")
    alone(setting.device, report)


def alone(device: str, report: Report) -> None:
    start = time.perf_counter()
    group = BroadcastGroup(address(), ROOT, 1, device, 60.0)
    report.at_most("one rank connects", time.perf_counter() - start, 30.0, "s")
    sent = torch.arange(1 << 16, device=device)
    group.broadcast(sent)
    unchanged = torch.equal(sent.cpu(), torch.arange(1 << 16))
    report.note("its broadcast leaves the tensor as it was", unchanged, "True", unchanged)
    start = time.perf_counter()
    group.close()
    report.at_most("it leaves", time.perf_counter() - start, SLACK_S, "s")
