"""skyrl-train report RUN [RUN ...] [--out report.html]

Writes one HTML file of at most 5 MB that shows runs offline: curves, diagnosis, the keys in which they differ, and a
sample of rollouts from all over each run. RUN is a run's folder (its trainer.ckpt_path). The run may be running, have
ended or be copied from elsewhere. `skyrl-train watch` shows the same page with all rollouts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.terminal import escape_control_chars, print_stderr, print_stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 2 for wrong arguments, unreadable runs, or a file that cannot be written.
    """
    parser = argparse.ArgumentParser(prog="skyrl-train report", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the file to write")
    options = parser.parse_args(sys.argv[1:] if arguments is None else list(arguments))
    try:
        print_stdout(_report([resolve_local_folder(run) for run in options.runs], options.out))
    except (SkyRLError, OSError) as error:
        print_stderr(f"skyrl-train report: {error}")
        sys.exit(2)


def _report(folders: Sequence[Path], out: Path) -> str:
    """Write the file and return a line about it. Raises ConfigError if it cannot be written."""
    from skyrl_train.report.html_report import make_report
    from skyrl_train.report.viewer_page import render_page

    html_report = make_report(folders, render_page)
    try:
        atomic_write_text(out, html_report.html)
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be written: {error.strerror or error}. Choose a file in a folder that you can "
            "write to."
        ) from error
    size = out.stat().st_size / 1e6
    saved = f"{html_report.rollouts:,} of {html_report.total_rollouts:,} saved rollouts"
    return f"{escape_control_chars(str(out))}: {size:.1f} MB with {saved}."


if __name__ == "__main__":
    main()
