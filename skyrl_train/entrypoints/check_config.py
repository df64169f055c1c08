"""check_config [--sft | --generate | --serve | --plan [--probe]] [--elsewhere] key=value ...: check a configuration.

The arguments are those of training with rewards, or of the entrypoint that a flag names: supervised fine-tuning, an
evaluation, or serving engines.

The check starts nothing. Exit code 0 and "config ok" with notes and warnings, or 2 and every problem at once. Wrong
keys and files, and engines and accelerators that are missing here, are reported within two seconds. Then follow, within
ten seconds, models that cannot be trained or served, tokenizers and data that do not fit them, plugins, folders that
cannot be written to, and a hub that does not respond. `--elsewhere` is for a run on another machine: nothing of this
machine is checked, and plugins are imported only for a plan. `--plan` also prints what every slot will hold in memory,
and the slots, tokens and steps of the run; that reads the data and the models' configurations, not their weights.
`--probe` starts the run in a temporary folder, measures it for about 20 s after the start, and prints how long a step
and the run will take and what to set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from skyrl_train.cluster.external_cluster import external_cluster_has_gpus
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import PreparedConfig, run_entrypoint
from skyrl_train.config.schema import Config
from skyrl_train.entrypoints.plan_report import PROBE_HINT, DataStats, align_columns, compute_data_stats, run_lines
from skyrl_train.entrypoints.serve import ENDPOINT
from skyrl_train.errors import ConfigError, StorageError
from skyrl_train.experiment.base import Experiment, exit_on_failure, required_components
from skyrl_train.experiment.driver import exit_with_signal_status
from skyrl_train.experiment.plugins import check_plugins, names_of_user_code
from skyrl_train.registry import load_object
from skyrl_train.terminal import print_stderr, print_stdout

if TYPE_CHECKING:
    from skyrl_train.experiment.memory_plan import SlotMemoryPlan

PLAN = "--plan"
PROBE = "--probe"
ELSEWHERE = "--elsewhere"
ENTRYPOINTS = {
    "--sft": "skyrl_train.entrypoints.main_sft:SFTExp",
    "--generate": "skyrl_train.entrypoints.main_generate:EvaluationExp",
    "--serve": "skyrl_train.entrypoints.serve:ServingExp",
}
"""Flags -> the experiments whose requirements they check."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process.

    Raises:
        SystemExit: With 2 for a wrong configuration. With --probe also with 1 if the probe failed, and with 128 + the
            signal's number after a signal.
    """
    argv = sys.argv[1:] if arguments is None else arguments
    rest = [argument for argument in argv if argument not in (PLAN, PROBE, ELSEWHERE, *ENTRYPOINTS)]
    named = [argument for argument in argv if argument in ENTRYPOINTS]
    experiment = load_object(ENTRYPOINTS[named[0]]) if named else Experiment
    if named == ["--serve"]:
        rest = [ENDPOINT, *rest]
    here, probes = ELSEWHERE not in argv, PROBE in argv
    plans = PLAN in argv or probes

    def check(prepared: PreparedConfig) -> None:
        if named[1:] or (named and plans):
            raise ConfigError(
                f"{' '.join(named)}: give at most one of these flags, and none with --plan or --probe, which are for "
                "training with rewards."
            )
        if probes and not here:
            raise ConfigError("--probe --elsewhere: a probe runs on this machine. Leave one of the flags out.")
        if here or (plans and prepared.config.trainer.plugins):
            check_plugins(prepared.config)
        if here:
            check_machine(prepared.config, required_components(experiment))
        if plans:
            report_with_plan(prepared, here, probes)
        else:
            report(prepared)
            if not here:
                report_unchecked_names(prepared.config)
        if probes:
            report_probe(prepared.config)

    def check_all() -> None:
        has_accelerator = external_cluster_has_gpus if here else lambda: None
        components = required_components(experiment) if here else None
        run_entrypoint(
            check,
            rest,
            components=components,
            trust_run_folder=False,
            is_elsewhere=not here,
            has_accelerator=has_accelerator,
        )

    if not probes:
        return check_all()
    with exit_with_signal_status(), exit_on_failure():
        check_all()


def check_machine(config: Config, components: RunComponents) -> None:
    """Check models, tokenizer, data and addresses on this machine. Imports torch.

    Raises:
        ConfigError: A check failed, or a storage cannot be reached.
    """
    from skyrl_train.experiment.preflight import check_run

    try:
        check_run(config, components)
    except StorageError as error:
        raise ConfigError(str(error)) from error


def report(prepared: PreparedConfig) -> None:
    """Print that the configuration is valid."""
    print("config ok")


def report_unchecked_names(config: Config) -> None:
    """Print a note with the names that only user code can check, because its modules were not imported."""
    names = ", ".join(f"{key}={name}" for key, name in names_of_user_code(config))
    if names:
        print_stderr(
            f"note: not checked: {names}. --elsewhere does not import trainer.plugins. "
            "`skyrl-train plan --elsewhere` imports them and checks these names."
        )


def report_with_plan(prepared: PreparedConfig, here: bool, probes: bool) -> None:
    """Print that the configuration is valid, its memory plan and the table of the run. Imports torch.

    Args:
        prepared: The checked configuration.
        here: True if the run is for this machine, so that its data can be read.
        probes: True if a probe follows, which measures the seconds.

    Raises:
        ConfigError: A model cannot be loaded.
    """
    from skyrl_train.experiment.algorithm import build_policy_objective_spec
    from skyrl_train.experiment.memory_plan import memory_capacity, memory_plan
    from skyrl_train.experiment.memory_tuning import tune_and_report

    objective_spec = build_policy_objective_spec(prepared.config)
    config = tune_and_report(prepared.config, objective_spec)
    capacity = memory_capacity(config.device)
    plans = memory_plan(config, capacity, objective_spec)
    report(prepared)
    for line in plan_lines(plans, config.device, capacity, memory_capacity("cpu")):
        print_stdout(line)
    data = _data(config) if here else "not read with --elsewhere"
    for line in run_lines(config, plans, data, "" if probes else PROBE_HINT):
        print_stdout(line)


def _data(config: Config) -> DataStats | str:
    """Return the statistics of the training data, or why it cannot be read. That must not hide the plan."""
    try:
        return compute_data_stats(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def report_probe(config: Config) -> None:
    """Start the run in a temporary folder, measure it and print the result. Raises what the run raises."""
    from skyrl_train.entrypoints.probe import probe
    from skyrl_train.entrypoints.probe_report import probe_lines

    for line in probe_lines(config, probe(config)):
        print_stdout(line)


def plan_lines(plans: Sequence[SlotMemoryPlan], device: str, capacity: int | None, host: int | None) -> Iterator[str]:
    """Yield a table for every kind of slot, then a line for each on whether it fits.

    Args:
        plans: The plan of each kind of slot.
        device: "cuda" or "cpu".
        capacity: Bytes of an accelerator; None if unknown.
        host: Bytes of this machine's main memory; None if unknown.
    """
    from skyrl_train.experiment.memory_plan import PHASES

    unit, size = ("GiB", 2**30) if max(plan.peak()[0] for plan in plans) >= 2**30 else ("MiB", 2**20)
    for plan in plans:
        yield ""
        yield f"{plan.name}: {plan.count} slot{'s' if plan.count > 1 else ''}, {unit}"
        for on_host in (False, True):
            rows = [row for row in plan.items if row.on_host == on_host]
            if not rows:
                continue
            table = [["on the host" if on_host else "", "", *PHASES, ""]]
            for row in rows:
                shown = f"{'' if row.exact else '~'}{row.size / size:,.2f}"
                table.append([row.role, row.name, *(shown if p in row.phases else "" for p in PHASES), row.note])
            totals = [f"{plan.total(phase, on_host=on_host) / size:,.2f}" for phase in PHASES]
            table.append(["peak", "", *totals, ""])
            yield from align_columns(table, 2)
    yield ""
    yield "~ is an estimate. A peak is less than its column's sum where rows are never held at the same time."
    yield from _fit_lines(plans, device, capacity, host, unit, size)


def _fit_lines(
    plans: Sequence[SlotMemoryPlan], device: str, capacity: int | None, host: int | None, unit: str, size: int
) -> Iterator[str]:
    def verdict(subject: str, needed: int, available: int | None) -> str:
        if available is None:
            return f"{subject}: {needed / size:,.2f} {unit}"
        fits = "fits" if needed <= available else "DOES NOT FIT"
        return f"{subject}: {needed / size:,.2f} of {available / size:,.2f} {unit}: {fits}"

    if device == "cpu":
        yield verdict("all slots together, on this machine", sum(p.count * p.peak()[0] for p in plans), host)
        return
    host_bytes = sum(plan.count * plan.peak(on_host=True)[0] for plan in plans)
    if capacity is None:  # this machine has no accelerator, so its main memory says nothing about the run's either
        for plan in plans:
            yield verdict(f"{plan.name}, on each accelerator", plan.peak()[0], None)
        yield verdict("host memory of all slots together", host_bytes, None)
        yield "nvidia-smi shows no accelerator here: nothing is compared, and KV caches are sized for one step."
        return
    for plan in plans:
        yield verdict(f"{plan.name}, on an accelerator like this machine's", plan.peak()[0], capacity)
    yield verdict("host memory of all slots together, on this machine", host_bytes, host)


if __name__ == "__main__":
    main()
