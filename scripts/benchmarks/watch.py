"""What `skyrl-train watch` needs to open a run's rollouts and to filter them, asked over HTTP as the page asks.

    python scripts/benchmarks/watch.py [--steps 100] [--rollouts 1000] [--tokens 200] [--rounds 3] [--json FILE]

`--rollouts` of every step. Made-up ones, in files that the system may have in memory. "open": a new process of `watch`,
from its first request for rollouts on. Each question is asked once of every new process, so that nothing of its answer
is known; median, least and most of all rounds. Wanted for 100,000: open in 3 s, filter in 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from measure import about, line

from skyrl_train.report.page_files import page
from skyrl_train.report.rollout_files import write_rollouts, write_vocabulary
from skyrl_train.report.rollout_packing import pack_messages
from skyrl_train.testing.made_up_rollouts import made_up_rollouts, made_up_vocabulary

QUESTIONS = {
    "open": "",
    "step": "step=50",
    "source and reward": "source=math&reward_min=0.5&reward_max=0.75&order=-reward",
    "length": "tokens_min=100&tokens_max=200&order=-tokens",
    "text": "text=kiba",
    "rare text": "text=nowhere at all&order=-reward",
    "text, source, reward": "text=bada&source=tools&reward_min=0.5",
}


def ask(server: str, token: str, question: str) -> tuple[float, int]:
    """Seconds, and the number of rollouts found."""
    url = f"{server}/api/rollouts?run=0&{question.replace(' ', '%20')}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)["total"]
    return time.perf_counter() - begun, found


def measured(run: Path) -> dict[str, tuple[float, int]]:
    """The questions asked of a new process; "peak" is its memory in GiB."""
    command = [sys.executable, "-m", "skyrl_train.entrypoints.watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server, _, token = process.stdout.readline().strip().partition("/#access_token=")
        found = {name: ask(server, token, question) for name, question in QUESTIONS.items()}
        found["peak"] = psutil.Process(process.pid).memory_info().rss / 2**30, 0
        process.terminate()
    return found


def write_run(run: Path, options: argparse.Namespace) -> None:
    write_vocabulary(run, made_up_vocabulary())
    for step in range(1, options.steps + 1):
        table = made_up_rollouts(options.rollouts, step, mean_tokens=options.tokens)
        pairs = zip(table["messages"].to_pylist(), table["text"].to_pylist(), strict=True)
        packed = pa.array([pack_messages(json.loads(messages), text) for messages, text in pairs])  # as a run does
        write_rollouts(run, step, table.set_column(table.column_names.index("messages"), "messages", packed))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    page()  # built before it is timed
    with tempfile.TemporaryDirectory(prefix="watch-") as name:
        run = Path(name)
        (run / "metrics.jsonl").touch()
        write_run(run, options)
        rounds = [measured(run) for _ in range(options.rounds)]
    found = {}
    for name in QUESTIONS:
        seconds = [one[name][0] for one in rounds]
        found[name] = [statistics.median(seconds), min(seconds), max(seconds), rounds[0][name][1]]
    return {"seconds": found, "peak_gib": max(one["peak"][0] for one in rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=1000, help="of every step")
    parser.add_argument("--tokens", type=int, default=200, help="of a response, mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    machine = about("pyarrow", "aiohttp")
    found = measure(options)
    print(line(machine))
    print(f"{options.steps * options.rollouts:,} rollouts of {options.tokens} tokens, {found['peak_gib']:.2f} GiB")
    print("| asked | s: median | least | most | found |\n| --- | --- | --- | --- | --- |")
    for name, (median, least, most, count) in found["seconds"].items():
        print(f"| {name} | {median:.3f} | {least:.3f} | {most:.3f} | {count:,} |")
    if options.json:
        options.json.write_text(json.dumps({"about": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
