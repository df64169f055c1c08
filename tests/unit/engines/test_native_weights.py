"""Weights for a server that loads folders: complete checkpoints, one at a time."""

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


def store(tmp_path: Path, hand_over: Callable[[str], None], **model: Any) -> CheckpointWeightStore:
    path = save_tiny_model(tmp_path / "model", **model)
    return CheckpointWeightStore(load_meta_model(path, torch.float32), tmp_path / "served", byte_tokenizer(), hand_over)


def write(store: CheckpointWeightStore, seed: int, tensors_a_bucket: int, **model: Any) -> None:
    tensors = [(name, tensor.detach()) for name, tensor in tiny_model(seed=seed, **model).named_parameters()]
    store.start()
    for start in range(0, len(tensors), tensors_a_bucket):
        store.load(tensors[start : start + tensors_a_bucket])


@pytest.mark.parametrize(
    "model",
    [{}, {"tied": False}, {"kind": "qwen3_moe", "tied": False}],
    ids=["tied", "untied", "mixture of experts"],
)
@pytest.mark.parametrize("tensors_a_bucket", [1, 1000], ids=["many files", "one file"])
def test_server_gets_complete_bitwise_equal_checkpoint(
    tmp_path: Path, tensors_a_bucket: int, model: dict[str, Any]
):
    seen: list[str] = []

    def hand_over(folder: str) -> None:
        assert list_checkpoint_names(folder) == list_checkpoint_names(str(tmp_path / "model")), (
            "as save_pretrained names them"
        )
        found = dict(load_causal_lm(folder, dtype=torch.float32).named_parameters())
        wanted = dict(tiny_model(seed=1, **model).named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert load_tokenizer(folder).encode("a") == byte_tokenizer().encode("a")
        seen.append(folder)

    folder = store(tmp_path, hand_over, **model)
    write(folder, 1, tensors_a_bucket, **model)
    assert not seen, "not before everything is there"
    folder.finish()
    assert len(seen) == 1 and Path(seen[0]).is_absolute()


def test_only_loaded_checkpoint_is_kept(tmp_path: Path):
    there: list[list[str]] = []
    folder = store(tmp_path, lambda path: there.append(sorted(one.name for one in Path(path).parent.iterdir())))
    write(folder, 1, 3)  # a transfer that died
    for seed in (2, 3):
        write(folder, seed, 3)
        folder.finish()
    assert there == [["weights_000001"], ["weights_000001", "weights_000002"]], (
        "the old one until the new one is loaded"
    )
    assert [one.name for one in (tmp_path / "served").iterdir()] == ["weights_000002"]


def test_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "served").write_text("a file")
    with pytest.raises(WeightSyncError, match=r"served.*generator\.weight_sync_folder"):
        write(store(tmp_path, lambda path: None), 1, 3)
