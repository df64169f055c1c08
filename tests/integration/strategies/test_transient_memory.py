"""Between passes a model keeps nothing on an accelerator that others share."""

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


@pytest.mark.defect("gathered-weights-beside-another-models-pass")
def test_layers_that_a_pass_gathered_are_given_up_where_others_need_the_room(tmp_path: Path):
    run_ranks(scores_twice, [(save_tiny_model(tmp_path),)], tmp_path)


def scores_twice(path: str) -> None:
    """In a process of its own: a mesh and its store live as long as that does."""
    options = {"strategy": STRATEGIES["fsdp2"], "fsdp_config": FSDPConfig(reshard_after_forward=False)}
    for shares in (False, True):
        worker = LearnerWorker(tiny_spec(path, **options, shares_accelerator=shares), 0, 1)
        worker.setup(*worker.address())
        first = worker.forward([policy_batch()], 1)
        gathered = [name for name, one in worker.module.named_parameters() if not isinstance(one, DTensor)]
        assert bool(gathered) != shares
        assert (worker.forward([policy_batch()], 1) == first).all()
        worker.close()
