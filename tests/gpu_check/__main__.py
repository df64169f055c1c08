"""`scripts/gpu_check`: see docs/contributing/gpu_checks.md.

Runs the parts without a result and stores results in one file, so the same command continues after an interruption.
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
    part_list = "\n".join(f"  {number:2} {part.name:14} {part.what}" for number, part in enumerate(PARTS, 1))
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=f"{__doc__}\nparts:\n{part_list}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit of this call; no part takes more than 8 minutes"
    )
    parser.add_argument(
        "--part",
        type=int,
        nargs="+",
        choices=range(1, len(PARTS) + 1),
        help="numbers of the parts to run, even if they have results",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs toy sizes with meaningless figures"
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/gpu_check.json"),
        help="file for the results; the table is written next to it, as Markdown",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.seconds > 10:
            faulthandler.dump_traceback_later(args.seconds - 5)  # shows where a part hung before it is killed
        return run_child(args.child, Setting(args.device, args.seconds), args.rows)
    if args.device == "cuda" and not has_gpu():
        print("torch finds no NVIDIA GPU. Use --device cpu to run every part at toy size.", file=sys.stderr)
        return 2
    os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    campaign = Campaign(args.json, args.device)
    success = campaign.run_parts(args.part or range(1, len(PARTS) + 1), args.minutes, again=args.part is not None)
    print(campaign.table())
    return 0 if success else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    # Ray and NCCL keep threads that outlive the interpreter's shutdown. All results are written by now.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
