"""Between passes a model keeps no gathered weights on an accelerator that others share."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import FSDPConfig
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.rank_processes import run_ranks


@pytest.mark.defect("gathered-weights-stay-in-memory")
def test_gathered_layers_are_freed_on_shared_accelerators(tmp_path: Path):
    run_ranks(compute_logprobs_twice, [(save_tiny_model(tmp_path),)], tmp_path)


def compute_logprobs_twice(path: str) -> None:
    """Run in a separate process: a mesh and its store exist as long as the process."""
    options = {"strategy": STRATEGIES["fsdp2"], "fsdp_config": FSDPConfig(reshard_after_forward=False)}
    for shares in (False, True):
        worker = LearnerWorker(tiny_spec(path, **options, shares_accelerator=shares), 0, 1)
        worker.setup(*worker.address())
        first = worker.forward([policy_batch()], 1)
        gathered = [name for name, parameter in worker.module.named_parameters() if not isinstance(parameter, DTensor)]
        assert bool(gathered) != shares
        assert (worker.forward([policy_batch()], 1) == first).all()
        worker.close()
