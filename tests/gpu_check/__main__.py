"""`scripts/gpu_check`: see docs/gpu.md.

Runs what has no result yet, and keeps results in one file, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from tests.gpu_check.campaign import Campaign, run_child
from tests.gpu_check.parts import PARTS
from tests.gpu_check.report import Setting


def main() -> int:
    listed = "\n".join(f"  {number:2} {part.name:14} {part.what}" for number, part in enumerate(PARTS, 1))
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=f"{__doc__}\nparts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call; no part takes more than 8")
    parser.add_argument(
        "--part", type=int, nargs="+", choices=range(1, len(PARTS) + 1), help="only these, even if they have results"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: toy sizes, no meaning in figures"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu_check.json"), help="results; the table is beside it"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        if given.seconds > 10:
            faulthandler.dump_traceback_later(given.seconds - 5)  # says where a part hung that is ended
        return run_child(given.child, Setting(given.device, given.seconds), given.rows)
    if given.device == "cuda" and not has_gpu():
        print("no NVIDIA GPU that torch can use; --device cpu runs every part at toy size", file=sys.stderr)
        return 2
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    campaign = Campaign(given.json, given.device)
    good = campaign.go(given.part or range(1, len(PARTS) + 1), given.minutes, again=given.part is not None)
    print(campaign.table())
    return 0 if good else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    # Ray and NCCL keep threads that outlive the interpreter's teardown: what a part found is written by now.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
