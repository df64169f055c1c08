"""Every module of ours is imported beside the CUDA wheels that are installed: in a process of its own, as part 1 of
scripts/gpu_check does, since engines change the process that imports them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu_check.environment import modules

pytestmark = pytest.mark.gpu
IMPORT_ALL = """
import json
from tests.gpu_check.environment import OPTIONAL, attempt, modules
from tests.gpu_check.report import Missing
found = {}
for name in modules():
    try:
        attempt(name, OPTIONAL)
    except Missing as error:
        found[name] = ["missing", str(error)]
    except Exception as error:
        found[name] = ["broken", f"{type(error).__name__}: {error}"]
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Of each module that was not imported: "missing" or "broken", and the reason."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    not_imported: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return not_imported


@pytest.mark.parametrize("name", modules())
def test_a_module_is_imported_beside_cuda_wheels(name: str, found: dict[str, list[str]]):
    state, reason = found.get(name, ["imported", ""])
    if state == "missing":
        pytest.skip(reason)
    assert state == "imported", reason
