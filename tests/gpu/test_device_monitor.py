"""A CUDA context after a kernel assertion. It runs in a subprocess, because the context cannot be repaired."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
KERNEL_ASSERTION = """
import torch
from skyrl_train.engines.step_loop import DeviceMonitor, check_device
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.errors import EngineError
device = torch.device("cuda")
lifecycle = Lifecycle("a")
monitor = DeviceMonitor(lifecycle, lambda: check_device(device))
monitor.check()
lifecycle.check_alive()
def step():
    return torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)].cpu()
try:
    monitor.run(step)
except EngineError as error:
    assert "is dead" in str(error), error
else:
    raise SystemExit("the kernel assertion was not detected")
try:
    lifecycle.check_alive()
except EngineError:
    print("dead")
"""


def test_kernel_assertion_kills_the_engine():
    completed = subprocess.run(
        [sys.executable, "-c", KERNEL_ASSERTION], capture_output=True, text=True, timeout=300, check=False
    )
    assert (completed.returncode, completed.stdout.strip()) == (0, "dead"), completed.stderr
