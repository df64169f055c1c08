"""CheckpointWeightStore writes complete checkpoints for a server, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.engines.http.native import CheckpointWeightStore
from skyrl_train.errors import WeightSyncError
from skyrl_train.models.loading import list_checkpoint_names, load_causal_lm, load_meta_model, load_tokenizer
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model


def store(tmp_path: Path, load_on_server: Callable[[str], None], **model: Any) -> CheckpointWeightStore:
    path = save_tiny_model(tmp_path / "model", **model)
    return CheckpointWeightStore(
        load_meta_model(path, torch.float32), tmp_path / "served", byte_tokenizer(), load_on_server
    )


def write(store: CheckpointWeightStore, seed: int, tensors_per_bucket: int, **model: Any) -> None:
    tensors = [(name, tensor.detach()) for name, tensor in tiny_model(seed=seed, **model).named_parameters()]
    store.start()
    for start in range(0, len(tensors), tensors_per_bucket):
        store.load(tensors[start : start + tensors_per_bucket])


@pytest.mark.parametrize(
    "model",
    [{}, {"tied": False}, {"kind": "qwen3_moe", "tied": False}],
    ids=["tied", "untied", "mixture of experts"],
)
@pytest.mark.parametrize("tensors_per_bucket", [1, 1000], ids=["many files", "one file"])
def test_server_gets_complete_bitwise_equal_checkpoint(tmp_path: Path, tensors_per_bucket: int, model: dict[str, Any]):
    loaded_folders: list[str] = []

    def load_on_server(folder: str) -> None:
        assert list_checkpoint_names(folder) == list_checkpoint_names(str(tmp_path / "model")), (
            "the names of save_pretrained"
        )
        loaded = dict(load_causal_lm(folder, dtype=torch.float32).named_parameters())
        expected = dict(tiny_model(seed=1, **model).named_parameters())
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        assert load_tokenizer(folder).encode("a") == byte_tokenizer().encode("a")
        loaded_folders.append(folder)

    folder = store(tmp_path, load_on_server, **model)
    write(folder, 1, tensors_per_bucket, **model)
    assert not loaded_folders, "not before the checkpoint is complete"
    folder.finish()
    assert len(loaded_folders) == 1 and Path(loaded_folders[0]).is_absolute()


def test_only_loaded_checkpoint_is_kept(tmp_path: Path):
    folders_at_load: list[list[str]] = []
    folder = store(
        tmp_path, lambda path: folders_at_load.append(sorted(path.name for path in Path(path).parent.iterdir()))
    )
    write(folder, 1, 3)  # an interrupted transfer
    for seed in (2, 3):
        write(folder, seed, 3)
        folder.finish()
    assert folders_at_load == [["weights_000001"], ["weights_000001", "weights_000002"]], (
        "the old checkpoint stays until the new one is loaded"
    )
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["weights_000002"]


def test_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "served").write_text("a file")
    with pytest.raises(WeightSyncError, match=r"served.*generator\.weight_sync_folder"):
        write(store(tmp_path, lambda path: None), 1, 3)
