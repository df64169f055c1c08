"""skyrl-train watch RUN [RUN ...] [--port PORT]

Shows runs in a browser: curves, diagnosis, differing keys, and all saved rollouts, token by token. RUN is a run's
folder (its trainer.ckpt_path). The run may be running, have ended or be copied from elsewhere; the page updates by
itself. The command only reads files. It listens on 127.0.0.1 and requires the token that is in the printed URL.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.errors import SkyRLError
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.terminal import escape_control_chars, print_stderr


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process. Blocks until SIGINT or SIGTERM.

    Raises:
        SystemExit: With 2 for wrong arguments, unreadable runs, or a port that cannot be used.
    """
    parser = argparse.ArgumentParser(prog="skyrl-train watch", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; by default any free one")
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    try:
        asyncio.run(_watch([resolve_local_folder(run) for run in options.runs], options.port))
    except (SkyRLError, OSError) as error:
        print_stderr(f"skyrl-train watch: {error}")
        sys.exit(2)


async def _watch(folders: Sequence[Path], port: int) -> None:
    from skyrl_train.report.viewer_page import render_page
    from skyrl_train.report.watch_server import WatchServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with WatchServer(folders, render_page(), port) as server:
        print(f"Watching {', '.join(escape_control_chars(str(folder)) for folder in folders)} at", flush=True)
        print(f"{server.address}\nCtrl-C ends it.", flush=True)
        await stop.wait()


if __name__ == "__main__":
    main()
