"""Every module of ours is imported beside the CUDA wheels that are installed: in a process of its own, as part 1 of
scripts/gpu_check does, since engines change the process that imports them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
IMPORT_ALL = """
import json
from tests.gpu_check.environment import OPTIONAL, attempt, modules
from tests.gpu_check.report import Missing
broken = {}
for name in modules():
    try:
        attempt(name, OPTIONAL)
    except Missing:
        pass
    except Exception as error:
        broken[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(broken))
"""


def test_every_module_imports_beside_cuda_wheels():
    """Modules that need an optional library which is not installed do not count."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    broken: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert not broken, "\n".join(f"{name}: {reason}" for name, reason in broken.items())
