"""Engines over HTTP: `python -m skyrl_train.entrypoints.serve key=value ...`

The engines load trainer.policy.model.path and serve it at generator.http_endpoint_host and http_endpoint_port until the
process is interrupted, or until no engine is alive: then it exits with status 1. The token is the environment variable
SKYRL_API_KEY; without one, the command prints the name of a file that holds a token.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from skyrl_train.config.predicates import RunComponents
from skyrl_train.errors import RunInterrupted
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

ENDPOINT = "generator.enable_http_endpoint=true"
"""The override that serving always sets, so that the keys of the endpoint take effect."""


class ServingExp(Experiment):
    """An experiment with a tokenizer, engines and their client, without data and trainer."""

    components = RunComponents(train_data=False, val_data=False, learner=False, rewards=False)

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """Return None: serving has no training data."""

    def get_eval_dataset(self) -> None:
        """Return None: serving has no evaluation data."""

    def run(self) -> None:
        with suppress(RunInterrupted):  # a signal is the normal way to end it
            super().run()

    async def _run(self) -> None:
        from skyrl_train.experiment.engines import serve_engines, wait_until_all_dead

        async with serve_engines(self.config, self.cluster, self.tokenizer, self.build_client) as client:
            await wait_until_all_dead(client)


@exit_with_signal_status()
def main() -> None:
    """Serve engines with the arguments of the process. Exits as `launch_experiment` does, with 0 after a signal."""
    launch_experiment(ServingExp, [ENDPOINT, *sys.argv[1:]])


if __name__ == "__main__":
    main()
