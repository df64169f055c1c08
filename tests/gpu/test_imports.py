"""Imports every module of the package together with the installed CUDA wheels.

A subprocess does so, like part 1 of scripts/gpu_check, because engines change the process that imports them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
IMPORT_ALL = """
import json
from tests.gpu_check.environment import OPTIONAL, import_module, modules
from tests.gpu_check.report import Missing
broken = {}
for name in modules():
    try:
        import_module(name, OPTIONAL)
    except Missing:
        pass
    except Exception as error:
        broken[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(broken))
"""


def test_every_module_imports_with_cuda_wheels():
    """Ignore modules that need an optional library which is not installed."""
    completed = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=400, check=False
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    broken: dict[str, str] = json.loads(completed.stdout.splitlines()[-1])
    assert not broken, "\n".join(f"{name}: {reason}" for name, reason in broken.items())
