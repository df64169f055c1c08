"""A device error on a real device, in a separate process because the device stays broken in its process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
BROKEN_DEVICE = """
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
    raise SystemExit("an assertion in a kernel was not noticed")
try:
    lifecycle.check_alive()
except EngineError:
    print("dead")
"""


def test_assertion_in_kernel_kills_engine():
    done = subprocess.run([sys.executable, "-c", BROKEN_DEVICE], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "dead"), done.stderr
