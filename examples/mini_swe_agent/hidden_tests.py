"""Grade a repository for the environment `agent`: print 1 if its own tests and all hidden scripts pass, else 0.

This file and hidden_tests.json are in the rows' column `grader_files`, with the original of the repository's own tests.
Run it as `python3 -I hidden_tests.py`, so that it imports nothing from the repository.
"""

import json
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 10
FOLDER = Path(__file__).resolve().parent


def main() -> None:
    file = FOLDER / "hidden_tests.json"
    tests = json.loads(file.read_text())
    file.unlink()  # the code under test could read the expected outputs
    passes = run(["-m", "unittest", tests["module"]]) is not None
    print(int(passes and all(run(["-c", test["script"]]) == test["output"] for test in tests["scripts"])))


def run(arguments: list[str]) -> str | None:
    """Return the output of a Python program, or None if it fails or does not end in time."""
    try:
        process = subprocess.run(
            [sys.executable, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


if __name__ == "__main__":
    main()
