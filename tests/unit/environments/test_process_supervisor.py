from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from skyrl_train.environments import process_supervisor
from skyrl_train.environments.process_supervisor import CappedLog, copy_output_to_log

SECRET = "hf_0123456789abcdef"


def copied(path: Path, data: bytes, chunk: int) -> str:
    """Write data to a pipe in chunks, and return the contents of the log."""
    source, sink = os.pipe()
    copier = threading.Thread(target=copy_output_to_log, args=(source, CappedLog("(env 7) ", str(path))))
    copier.start()
    for start in range(0, len(data), chunk):
        os.write(sink, data[start : start + chunk])
    os.close(sink)
    copier.join()
    os.close(source)
    return path.read_text()


def test_each_line_carries_the_name_of_its_process(tmp_path: Path):
    text = copied(tmp_path / "log", b"one\ntwo\n\n 10 %\r 20 %\r\na\tb\xff\x1b[2J\xf0\x9f\x98\x80\nno end\xc3", 3)
    lines = ["one", "two", "", " 10 %", " 20 %", "a       b\\xff\\x1b[2J\U0001f600", "no end\\xc3"]
    assert text == "".join(f"(env 7) {line}\n" for line in lines)


@pytest.mark.defect("unbounded-environment-output")
def test_full_log_drops_output_until_it_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_supervisor, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "log"
    log = CappedLog("(env 7) ", str(path))
    for _ in range(1000):
        log.write("x" * 100 + "\n")
    assert 1000 < path.stat().st_size < 1200
    assert path.read_text().endswith("x\n(env 7) ... more output is dropped\n")
    os.truncate(path, 0)
    log.write("again\n")
    assert path.read_text() == "(env 7) again\n"


@pytest.mark.defect("trackers-show-secrets")
@pytest.mark.parametrize("noise", [b"x", b"noise\n", b"\xf0\x9f\x98\x80"], ids=repr)
@pytest.mark.parametrize("chunk", [7, 4096])
def test_secrets_are_redacted_wherever_chunks_end(
    tmp_path: Path, noise: bytes, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    data = b"".join(noise * length + SECRET.encode() for length in (0, 1, 4090, 4096, 9999))
    text = copied(tmp_path / "log", data, chunk)
    pieces = [SECRET[start : start + 8] for start in range(len(SECRET) - 7)]
    assert text.replace("\n(env 7) ", "").count("<HF_TOKEN>") == 5
    assert not [piece for piece in pieces if piece in text]
