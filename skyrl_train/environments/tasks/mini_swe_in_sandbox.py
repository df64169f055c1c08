"""Code that the system's Python runs inside the sandbox of a mini_swe episode: it runs commands in the repository."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys

REPOSITORY = os.path.abspath("repository")
OUTPUT = os.path.abspath(".output")


def create_repository(files: dict[str, str]) -> None:
    """Write the files, commit them to a new git repository, and print "made".

    Args:
        files: Text of each file, by its path relative to the repository.
    """
    for name, text in files.items():
        _write(name, text.encode())
    for command in (
        ["-c", "init.defaultBranch=main", "init", "-q"],
        ["config", "user.name", "agent"],  # so that the agent can commit and stash
        ["config", "user.email", "agent@localhost"],
        ["add", "-A"],
        ["commit", "-q", "-m", "The repository as it was found"],
    ):
        subprocess.run(["git", *command], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    print("made")


def unpack() -> None:
    """Write the files of repository.json ({path: base64}), and replace this process by check.py.

    The files are written here so that a file that cannot be written fails the test and not the sandbox's creation.
    """
    with open("repository.json", encoding="utf-8") as source:
        files = json.load(source)
    for name, content in files.items():
        _write(name, base64.b64decode(content))
    os.execv(sys.executable, [sys.executable, "-I", "check.py"])


def _write(name: str, content: bytes) -> None:
    path = os.path.join(REPOSITORY, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def run_command(command: str, timeout_s: float, max_bytes: int) -> None:
    """Run a command in bash, and print its exit status and output as a line of JSON.

    Processes that it leaves in its process group are killed, which matters where no sandbox does this.

    Args:
        command: Command to run.
        timeout_s: Time after which the command is killed, in seconds. Its status is then 124.
        max_bytes: Maximum size of the output. The middle of longer output is replaced by a note.
    """
    timed_out = False
    with open(OUTPUT, "w+b") as output:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out, status = True, 124
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        size = output.seek(0, 2)
        output.seek(0)
        text = output.read(max_bytes).decode("utf-8", "replace")
        if size > max_bytes:
            text = text[: max_bytes // 2]
            output.seek(max(size - max_bytes // 2, 0))
            text += f"\n[... {size - max_bytes} of {size} bytes are left out ...]\n"
            text += output.read().decode("utf-8", "replace")
    if timed_out:
        text += f"\n[timed out after {timeout_s:g} s]"
    print("\n" + json.dumps({"returncode": status, "output": text}))


def print_files(max_files: int, max_bytes: int) -> None:
    """Print the repository's files as a line of JSON, {"files": {path: base64}}.

    Files of git, bytecode caches, links and special files are excluded. No file is printed if a limit is exceeded.

    Args:
        max_files: Maximum number of files.
        max_bytes: Maximum total size of the files.
    """
    contents: dict[str, str] = {}
    size = 0
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            size += os.path.getsize(path)
            if len(contents) >= max_files or size > max_bytes:
                print("\n" + json.dumps({"files": {}}))
                return
            with open(path, "rb") as file:
                contents[os.path.relpath(path, REPOSITORY)] = base64.b64encode(file.read()).decode("ascii")
    print("\n" + json.dumps({"files": contents}))
