from __future__ import annotations

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.learner import optimizer_steps
from skyrl_train.experiment.run_resources import build_schedule, data_fingerprints
from skyrl_train.registry import import_plugins


def test_learning_rate_schedule_spans_run():
    trainer = load_preset(
        ["trainer.train_batch_size=8", "trainer.update_epochs_per_batch=3", "trainer.epochs=2"]
    ).trainer
    assert optimizer_steps(trainer, build_schedule(trainer, 10), mini_batch_size=4) == 2 * 3 * (2 + 1)


def test_seed_and_batch_size_change_data_order():
    base, seed, size = (load_preset(one).trainer for one in ([], ["trainer.seed=1"], ["trainer.train_batch_size=8"]))
    assert data_fingerprints(base, "a") != data_fingerprints(seed, "a")
    assert data_fingerprints(base, "a") != data_fingerprints(size, "a")


def test_missing_plugin_is_named():
    with pytest.raises(ConfigError, match=r"trainer\.plugins.*'no_such_module_here'.*PYTHONPATH"):
        import_plugins(["no_such_module_here"])
