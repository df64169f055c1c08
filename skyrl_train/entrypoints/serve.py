"""Engines over HTTP: `python -m skyrl_train.entrypoints.serve key=value ...`

The engines load trainer.policy.model.path and serve it at generator.http_endpoint_host and http_endpoint_port until the
process is interrupted, or until no engine is alive: then it exits with status 1. The token is the environment's
SKYRL_API_KEY; without one, a file is named that holds it.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from skyrl_train.config.predicates import RunComponents
from skyrl_train.errors import RunInterrupted
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

ENDPOINT = "generator.enable_http_endpoint=true"
"""Values that serving sets by itself, so that the keys of the endpoint have an effect."""


class ServingExp(Experiment):
    """Tokenizer, engines and their client; no data, no trainer."""

    components = RunComponents(train_data=False, val_data=False, learner=False, rewards=False)

    def get_train_dataset(self) -> None:  # type: ignore[override]
        """There is nothing to train on."""

    def get_eval_dataset(self) -> None:
        """There is nothing to evaluate on."""

    def run(self) -> None:
        with suppress(RunInterrupted):  # there is no other way to end it
            super().run()

    async def _run(self) -> None:
        from skyrl_train.experiment.engines import serve_engines, wait_until_all_dead

        async with serve_engines(self.config, self.cluster, self.tokenizer, self.build_client) as client:
            await wait_until_all_dead(client)


@exit_with_signal_status()
def main() -> None:
    launch_experiment(ServingExp, [ENDPOINT, *sys.argv[1:]])


if __name__ == "__main__":
    main()
