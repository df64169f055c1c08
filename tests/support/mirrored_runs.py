"""Mirrored runs without a trainer: machines that save checkpoints, and the uploads that a server received."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from skyrl_train.storage.mirror import Mirror
from skyrl_train.trainer.checkpoints import CheckpointStore
from tests.support.s3_server import BUCKET, S3Server

URI = f"s3://{BUCKET}/team/run"


class MirroredMachine:
    """A machine of a run: a local folder with checkpoints, and its mirror."""

    def __init__(self, folder: Path, uri: str = URI, keep: int = -1):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.mirror = Mirror(folder, uri, keep)
        self.checkpoints = CheckpointStore(folder, keep, self.mirror)

    def __enter__(self) -> MirroredMachine:
        self.mirror.acquire_and_pull()
        self.mirror.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.mirror.stop()
        self.mirror.lease.release()

    def stop_renewals(self) -> None:
        """Stop renewing the lease, like a process that is stopped or killed."""
        self.mirror.lease.stop()
        self.mirror.lease._renewal.join(10)

    def save(self, step: int, text: str = "weights") -> Path:
        folder = self.checkpoints.begin(step)
        (folder / "policy").mkdir()
        (folder / "policy" / "rank_0").write_text(f"{text} of step {step}")
        (self.folder / "metrics.jsonl").write_text(json.dumps({"step": step}))
        return self.checkpoints.commit(step, {"text": text})

    def loaded(self) -> tuple[int, str] | None:
        found = self.checkpoints.find_resumable("latest")
        return (found.step, (found.path / "policy" / "rank_0").read_text()) if found is not None else None


def puts(server: S3Server, name: str) -> list[str]:
    """Return the names of all uploads that match a pattern, in order and with repetitions."""
    names = (line.rpartition("run/")[2] for line in server.seen if line.startswith("PUT"))
    return [uploaded for uploaded in names if re.match(name, uploaded)]


def wait_until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)
