from __future__ import annotations

import subprocess
import sys

from skyrl_train.report.memory import peak_memory

SCRIPT = """
from skyrl_train.report.memory import peak_memory
before = peak_memory("cpu")["peak_rss_gib"]
held = bytearray(b"1" * (256 << 20))
del held
print(peak_memory("cpu")["peak_rss_gib"] - before)
"""


def test_a_peak_is_counted_in_gib_and_stays_when_the_memory_is_given_back():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert 0.2 < float(done.stdout) < 0.6  # while it is copied it is there twice


def test_without_an_accelerator_only_the_machines_memory_is_counted():
    assert peak_memory("cpu").keys() == {"peak_rss_gib"}
