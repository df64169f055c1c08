from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.native_servers import end

SERVER = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory

def work(name):
    print(name, SharedMemory(create=True, size=64).name, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    segment = SharedMemory(create=True, size=64)
    multiprocessing.get_context("spawn").Process(target=work, args=(segment.name,)).start()
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no names here")
def test_stopped_server_leaves_no_processes_or_shared_memory(tmp_path: Path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        segments = [Path("/dev/shm") / name for name in server.stdout.readline().split()]
    assert all(segment.exists() for segment in segments)
    children = psutil.Process(server.pid).children(recursive=True)
    end(server)
    end(server)
    assert not any(child.is_running() for child in children)
    assert not any(segment.exists() for segment in segments)
