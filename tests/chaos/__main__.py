"""`scripts/chaos`: see tests/chaos/campaign.py."""

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
from tests.chaos.campaign import Campaign, Miss
from tests.chaos.elsewhere import TOKEN, engine_elsewhere
from tests.chaos.faults import find_faults
from tests.chaos.runs import ASYNCHRONOUS, KINDS, overrides_of, problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the campaign")
    parser.add_argument("--faults", type=int, help="stop after this number of faults")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the random faults")
    parser.add_argument("--kind", choices=sorted(KINDS), default="two_engines", help="kind of the runs")
    parser.add_argument("--only", help="comma-separated list; use only faults whose names contain one of these")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, ExitStack() as stack:
        root = Path(name)
        model = save_tiny_model(root / "model")
        proxy = None
        if args.kind == "engine_elsewhere":
            os.environ[API_KEY_ENV] = TOKEN
            proxy = stack.enter_context(engine_elsewhere(model))
        overrides = overrides_of(args.kind, problems(root), model, proxy.address if proxy else "")
        campaign = Campaign(
            root / "runs", overrides, list(find_faults(args.only)), args.seed, proxy, args.kind != ASYNCHRONOUS
        )
        print(f"seed {args.seed}, runs of {args.kind}")
        try:
            campaign.go(args.minutes * 60, args.faults)
        except Miss as miss:
            print(f"MISS: {miss}")
            return 1
        finally:
            print(f"{campaign.struck.total()} faults: {dict(campaign.struck)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
