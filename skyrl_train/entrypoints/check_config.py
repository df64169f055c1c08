"""python -m skyrl_train.entrypoints.check_config [--plan] [--elsewhere] key=value ...: what is wrong with it.

Starts nothing. Exit code 0 and "config ok" with notes and warnings, or 2 and every problem at once; files, models,
engines, plugins and accelerators that a training run would not find here are problems too. With `--elsewhere`, for a
run on another machine, nothing is looked for, and plugins are imported for a plan alone. With `--plan` it also prints
what every slot will hold in memory; that reads the configurations of the models, not their weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from skyrl_train.config.prepare import PreparedConfig, launch
from skyrl_train.config.presence import Uses

if TYPE_CHECKING:
    from skyrl_train.assembly.memory_plan import SlotPlan

PLAN = "--plan"
ELSEWHERE = "--elsewhere"


def main(arguments: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if arguments is None else arguments
    here = ELSEWHERE not in argv
    tell = report_with_plan if PLAN in argv else report

    def check(prepared: PreparedConfig) -> None:
        if prepared.config.trainer.plugins and (here or PLAN in argv):
            from skyrl_train.assembly.names import check_plugins

            check_plugins(prepared.config)
        tell(prepared)

    rest = [argument for argument in argv if argument not in (PLAN, ELSEWHERE)]
    launch(check, rest, uses=Uses() if here else None)


def report(prepared: PreparedConfig) -> None:
    print("config ok")


def report_with_plan(prepared: PreparedConfig) -> None:
    """torch is only imported here: a check without a plan is done before it would be loaded."""
    from skyrl_train.assembly.algorithm import policy_learning
    from skyrl_train.assembly.capacity import capacity_of
    from skyrl_train.assembly.memory_fit import announce_fit
    from skyrl_train.assembly.memory_plan import memory_plan

    learning = policy_learning(prepared.config)
    config = announce_fit(prepared.config, learning)
    capacity = capacity_of(config.device)
    plans = memory_plan(config, capacity, learning)
    report(prepared)
    for line in plan_lines(plans, config.device, capacity, capacity_of("cpu")):
        print(line)


def plan_lines(plans: Sequence[SlotPlan], device: str, capacity: int | None, host: int | None) -> Iterator[str]:
    """A table for every kind of slot, and whether it fits. `capacity`: bytes of the device; `host`: of this machine."""
    from skyrl_train.assembly.memory_plan import PHASES

    unit, size = ("GiB", 2**30) if max(plan.peak()[0] for plan in plans) >= 2**30 else ("MiB", 2**20)
    for plan in plans:
        yield ""
        yield f"{plan.name}: {plan.count} slot{'s' if plan.count > 1 else ''}, {unit}"
        for on_host in (False, True):
            rows = [row for row in plan.lines if row.on_host == on_host]
            if not rows:
                continue
            table = [["on the host" if on_host else "", "", *PHASES, ""]]
            for row in rows:
                shown = f"{'' if row.exact else '~'}{row.size / size:,.2f}"
                table.append([row.role, row.what, *(shown if p in row.phases else "" for p in PHASES), row.note])
            totals = [f"{plan.total(phase, on_host=on_host) / size:,.2f}" for phase in PHASES]
            table.append(["at its peak", "", *totals, ""])
            yield from _aligned(table)
    yield ""
    yield "~ is an estimate. A peak is less than its column's sum where rows are never there at the same time."
    yield from _verdicts(plans, device, capacity, host, unit, size)


def _verdicts(
    plans: Sequence[SlotPlan], device: str, capacity: int | None, host: int | None, unit: str, size: int
) -> Iterator[str]:
    def verdict(what: str, needed: int, there: int | None) -> str:
        if there is None:
            return f"{what}: {needed / size:,.2f} {unit}"
        fits = "fits" if needed <= there else "DOES NOT FIT"
        return f"{what}: {needed / size:,.2f} of {there / size:,.2f} {unit}: {fits}"

    if device == "cpu":
        yield verdict("all slots together, on this machine", sum(p.count * p.peak()[0] for p in plans), host)
        return
    moved = sum(plan.count * plan.peak(on_host=True)[0] for plan in plans)
    if capacity is None:  # nor is this the machine whose memory counts
        for plan in plans:
            yield verdict(f"{plan.name}, on each accelerator", plan.peak()[0], None)
        yield verdict("host memory of all slots together", moved, None)
        yield "nvidia-smi shows no accelerator here: nothing is compared, and caches are for the sequences of a step."
        return
    for plan in plans:
        yield verdict(f"{plan.name}, on an accelerator like this machine's", plan.peak()[0], capacity)
    yield verdict("host memory of all slots together, on this machine", moved, host)


def _aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        words, numbers = row[:2], row[2:-1]
        cells = [text.ljust(width) for text, width in zip(words, widths, strict=False)]
        cells += [text.rjust(width) for text, width in zip(numbers, widths[2:], strict=False)]
        yield ("  " + "  ".join([*cells, row[-1]])).rstrip()


if __name__ == "__main__":
    main()
