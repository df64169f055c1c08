"""skyrl-train simulate [--slots N] [--engines 1,2] [--staleness 0,1,2] [--timings FILE | --from RUN] key=value ...

What a run of this configuration would take on N slots, by how many of them are engines and how far rollouts run ahead:
the real loop, queue, samplers, client and supervisor, over engines and a learner that only wait, in virtual time. Where
the timings are from, and what is assumed: docs/async.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config.prepare import PreparedConfig, launch
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.messages import to_stderr

if TYPE_CHECKING:
    from skyrl_train.simulation.run import Split
    from skyrl_train.simulation.timings import Timings


def main(arguments: Sequence[str] | None = None) -> None:
    given, rest = _parser().parse_known_args(sys.argv[1:] if arguments is None else list(arguments))
    try:
        launch(lambda prepared: _simulate(prepared, given), [*_TRIED, *filter(_is_no_layout, rest)])
    except SkyRLError as error:
        to_stderr(f"{type(error).__name__}: {error}")
        sys.exit(1)


_TRIED = ("trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false")
"""Both ways of each are tried, whatever the configuration says; with these, no key for one of them is idle."""


def _is_no_layout(word: str) -> bool:
    return word.partition("=")[0].lstrip("+") not in {one.partition("=")[0] for one in _TRIED}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyrl-train simulate", description=__doc__.partition("\n\n")[2])
    numbers, fractions = _list_of(int), _list_of(float)
    parser.add_argument("--slots", type=int, default=8, help="accelerators to divide")
    parser.add_argument("--engines", type=numbers, help="of the slots, to be tried; the rest train. All by default")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2], help="steps; 0 is synchronous")
    parser.add_argument("--over-provisioning", type=fractions, default=[0.0], help="tried where it is synchronous")
    parser.add_argument("--steps", type=int, default=16, help="of every simulated run")
    parser.add_argument("--timings", type=Path, help="a YAML file: skyrl_train/simulation/timings.py has its keys")
    parser.add_argument("--from", type=Path, dest="run", help="the folder of a finished synchronous run")
    parser.add_argument("--png", type=Path, help="where to draw the table")
    return parser


def _list_of(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(one) for one in text.split(",")]

    return parse


def _simulate(prepared: PreparedConfig, given: argparse.Namespace) -> None:
    from skyrl_train.simulation.report import table
    from skyrl_train.simulation.run import simulate

    cfg = prepared.config
    timings = _timings(given)
    outcomes = [simulate(cfg, timings, split, given.steps) for split in splits(given)]
    for line in table(outcomes):
        print(line)
    if given.png is not None:
        from skyrl_train.report.curve import write_splits

        print(f"drawn: {write_splits(outcomes, given.png)}")


def _timings(given: argparse.Namespace) -> Timings:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from skyrl_train.simulation.fit import fit
    from skyrl_train.simulation.timings import Timings

    if given.run is not None:
        return fit(given.run)
    if given.timings is None:
        return Timings()
    try:
        found = OmegaConf.merge(OmegaConf.structured(Timings), OmegaConf.load(given.timings))
    except (OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"--timings {given.timings}: {str(error).partition(chr(10))[0]}") from error
    timings: Timings = OmegaConf.to_object(found)  # type: ignore[assignment]
    for key, pace in (
        ("engine.beside_learner", timings.engine.beside_learner),
        ("learner.beside_engines", timings.learner.beside_engines),
    ):
        if not pace >= 1:
            raise ConfigError(f"--timings {given.timings}: {key}={pace}: must be at least 1, times as long as alone.")
    return timings


def splits(given: argparse.Namespace) -> list[Split]:
    """All slots colocated, and then every division of them with every staleness."""
    from skyrl_train.simulation.run import Split, least_steps

    if given.steps < (least := least_steps(max(given.staleness))):
        raise ConfigError(
            f"--steps {given.steps}: must be at least {least} with a staleness of {max(given.staleness)}, as those in "
            "which rollouts get ahead, and the last ones, are not counted."
        )
    engines = given.engines or range(1, given.slots)
    if wrong := [one for one in engines if not 0 < one < given.slots]:
        raise ConfigError(
            f"--engines {wrong[0]}: must be from 1 to {given.slots - 1}, as some of {given.slots} slots train."
        )
    apart = [Split(one, given.slots - one, ahead) for one in engines for ahead in given.staleness]
    colocated = Split(given.slots, given.slots, colocated=True)
    synchronous = [one for one in (colocated, *apart) if one.staleness == 0]
    extra = [replace(one, over_provisioning=more) for one in synchronous for more in given.over_provisioning if more]
    return [colocated, *apart, *extra]


if __name__ == "__main__":
    main()
