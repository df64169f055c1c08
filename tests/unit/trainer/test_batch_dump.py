from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from skyrl_train.data.batch import TrainBatch
from skyrl_train.trainer.batch_dump import BatchDump, read_batch
from tests.support.learner_specs import policy_batch


def test_batch_is_read_back_bitwise(tmp_path: Path):
    batch = policy_batch()
    batch = batch.with_tokens(old_logprobs=batch.rollout_logprobs)  # two fields share memory
    uids = [f"row {i}\n\ud83d" for i in range(len(batch))]
    BatchDump(tmp_path / "dumped").write(3, batch, uids)
    (file,) = (tmp_path / "dumped").iterdir()
    assert file.name == "global_step_3_training_input.safetensors"
    loaded, loaded_uids = read_batch(file)
    assert loaded_uids == uids
    for name in (field.name for field in fields(TrainBatch)):
        actual, expected = getattr(loaded, name), getattr(batch, name)
        assert (actual is None) == (expected is None), name
        assert actual is None or (actual.dtype == expected.dtype and torch.equal(actual, expected)), name


def test_repeated_step_replaces_its_file(tmp_path: Path):
    dump, batch = BatchDump(tmp_path), policy_batch()
    for reward in (0.0, 1.0):
        dump.write(1, replace(batch, rewards=torch.full_like(batch.rewards, reward)), ["x"] * len(batch))
    (file,) = tmp_path.iterdir()
    assert read_batch(file)[0].rewards.unique().tolist() == [1.0]


def test_unwritable_folder_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    dump = BatchDump(tmp_path / "file" / "dumped")
    for step in (1, 2):
        dump.write(step, policy_batch(), ["x"] * 8)
    assert caplog.text.count("trainer.dump_data_batch") == 1
