"""Inject random faults into tiny runs, and check that each run recovers or reports why it ended."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from skyrl_train.listeners import API_KEY_ENV
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.chaos.campaign import Campaign, InvariantViolation
from tests.chaos.external_engine import TOKEN, external_engine
from tests.chaos.faults import find_faults
from tests.chaos.runs import ASYNCHRONOUS, KINDS, make_overrides, write_data


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the campaign")
    parser.add_argument("--faults", type=int, help="stop after this number of faults")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the random faults")
    parser.add_argument("--kind", choices=sorted(KINDS), default="two_engines", help="configuration of the runs")
    parser.add_argument("--only", help="comma-separated texts; use only faults whose names contain one of them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, ExitStack() as stack:
        root = Path(name)
        model = save_tiny_model(root / "model", "qwen3")
        proxy = None
        if args.kind == "external_engine":
            os.environ[API_KEY_ENV] = TOKEN
            proxy = stack.enter_context(external_engine(model))
        overrides = make_overrides(args.kind, write_data(root), model, proxy.address if proxy else "")
        campaign = Campaign(
            root / "runs", overrides, list(find_faults(args.only)), args.seed, proxy, args.kind != ASYNCHRONOUS
        )
        print(f"seed {args.seed}, runs of {args.kind}")
        try:
            campaign.run(args.minutes * 60, args.faults)
        except InvariantViolation as violation:
            print(f"VIOLATION: {violation}")
            return 1
        finally:
            print(f"{campaign.strikes.total()} faults: {dict(campaign.strikes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
