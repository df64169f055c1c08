"""A poisoned context on a real device: in a process of its own, as it stays poisoned."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
POISONED = """
import torch
from skyrl_train.engines.step_loop import DeviceMonitor, compute
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.errors import EngineError
device = torch.device("cuda")
lifecycle = Lifecycle("a")
monitor = DeviceMonitor(lifecycle, lambda: compute(device))
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


def test_an_assertion_in_a_kernel_is_the_death_of_an_engine():
    done = subprocess.run([sys.executable, "-c", POISONED], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "dead"), done.stderr
