"""skyrl-train COMMAND: what is done by hand before and beside a run.

    skyrl-train env try ENV --data FILE ...     show a row's prompt, score completions: no model needed
    skyrl-train check-config key=value ...      what is wrong with a configuration (also skyrl-check-config)
    skyrl-train simulate key=value ...          what a run takes by engines, trainers and staleness: nothing is started

Training is `python -m skyrl_train.entrypoints.main_base key=value ...`.
"""

from __future__ import annotations

import sys

from skyrl_train.entrypoints import check_config, env_try, simulate


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:2] == ["env", "try"]:
        env_try.main(arguments[2:])
    elif arguments[:1] == ["check-config"]:
        check_config.main(arguments[1:])
    elif arguments[:1] == ["simulate"]:
        simulate.main(arguments[1:])
    elif arguments in (["-h"], ["--help"]):
        print(__doc__)
    else:
        print(f"skyrl-train: unknown command {' '.join(arguments[:2])!r}.\n\n{__doc__}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
