from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import CheckpointError
from skyrl_train.strategies.checkpoint_shards import CheckpointShard, ParameterSlice, open_shards

VALUES = torch.arange(14.0)
META = {"world_size": 3, "updates": 5, "trained": True}


def make_slice(start: int, stop: int) -> ParameterSlice:
    return ParameterSlice((7, 2), "float32", start, stop)


def write_shards(folder: Path, ranges: list[tuple[int, int]]) -> None:
    for rank, (start, stop) in enumerate(ranges):
        meta = {**META, "world_size": len(ranges)}
        CheckpointShard(rank, {"w": make_slice(start, stop)}, {"param/w": VALUES[start:stop]}, meta).write(folder)


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 14)],
        [(0, 6), (6, 12), (12, 14)],
        [(0, 5), (5, 9), (9, 14)],  # in the middle of rows
        [(0, 8), (8, 14), (14, 14)],  # more ranks than rows: some are empty
        [(0, 8), (8, 14), (0, 8), (8, 14)],  # replicas
    ],
)
@pytest.mark.parametrize("requested", [(0, 14), (4, 10), (7, 8), (14, 14), (0, 1)])
def test_elements_are_assembled_from_all_ranks(
    tmp_path: Path, ranges: list[tuple[int, int]], requested: tuple[int, int]
) -> None:
    write_shards(tmp_path, ranges)
    with open_shards(tmp_path) as reader:
        reader.check_parameters({"w": make_slice(0, 14)})
        assert torch.equal(reader.read_elements("param/w", make_slice(*requested)), VALUES[slice(*requested)])


def test_saved_tensor_is_flat(tmp_path: Path) -> None:
    CheckpointShard(0, {"w": make_slice(0, 14)}, {"param/w": VALUES.view(2, 7).T}, {**META, "world_size": 1}).write(
        tmp_path
    )
    with open_shards(tmp_path) as reader:
        assert torch.equal(reader.read_elements("param/w", make_slice(0, 14)).view(7, 2), VALUES.view(2, 7).T)


def test_ranks_write_separate_files(tmp_path: Path) -> None:
    write_shards(tmp_path, [(0, 8), (8, 14)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"shard_{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    ]


@pytest.mark.parametrize("file", ["shard_1.json", "shard_1.safetensors", "shard_0.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_corrupt_checkpoint_error_names_the_file(tmp_path: Path, file: str, damage: str) -> None:
    write_shards(tmp_path, [(0, 8), (8, 14)])
    path = tmp_path / file
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=file), open_shards(tmp_path):
        pass


def test_missing_elements_are_reported(tmp_path: Path) -> None:
    write_shards(tmp_path, [(0, 3), (4, 14)])
    with open_shards(tmp_path) as reader, pytest.raises(CheckpointError, match="elements 3:14 of 'w'"):
        reader.read_elements("param/w", make_slice(0, 14))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (
            {"w": ParameterSlice((7, 3), "float32", 0, 21)},
            r"'w' is float32 \[7, 2\] in the checkpoint and float32 \[7, 3\]",
        ),
        ({"w": ParameterSlice((7, 2), "bfloat16", 0, 14)}, r"bfloat16 \[7, 2\] in the model"),
        ({"w": make_slice(0, 14), "more": make_slice(0, 14)}, "'more' is absent in the checkpoint"),
        ({}, "absent in the model"),
    ],
)
def test_checkpoint_of_another_model_is_rejected(
    tmp_path: Path, slices: dict[str, ParameterSlice], message: str
) -> None:
    write_shards(tmp_path, [(0, 14)])
    with open_shards(tmp_path) as reader, pytest.raises(CheckpointError, match=message):
        reader.check_parameters(slices)


def test_json_describes_the_slices(tmp_path: Path) -> None:
    write_shards(tmp_path, [(0, 8), (8, 14)])
    table = json.loads((tmp_path / "shard_1.json").read_text())
    assert table == {
        **{"world_size": 2, "updates": 5, "trained": True, "rank": 1},
        "slices": {"w": {"shape": [7, 2], "dtype": "float32", "start": 8, "stop": 14}},
    }


@pytest.mark.defect("forged-run-state")
@pytest.mark.parametrize(
    ("rank", "changes"),
    [
        (0, {"world_size": None}),
        (0, {"world_size": "many"}),
        (1, {"slices": None}),
        (1, {"slices": [1]}),
        (1, {"slices": {"w": {"shape": [7, 2]}}}),
        (1, {"slices": {"w": {"shape": [7, 2], "dtype": "float32", "start": "x", "stop": 14}}}),
    ],
)
def test_forged_json_error_names_file_and_key(tmp_path: Path, rank: int, changes: dict[str, Any]) -> None:
    write_shards(tmp_path, [(0, 8), (8, 14)])
    path = tmp_path / f"shard_{rank}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (key,) = changes
    with pytest.raises(CheckpointError, match=rf"shard_{rank}\.json: {key} (is|are) .*not "), open_shards(tmp_path):
        pass


@pytest.mark.defect("forged-run-state")
def test_forged_json_without_tensors_is_rejected(tmp_path: Path) -> None:
    write_shards(tmp_path, [(0, 8), (8, 14)])
    with open_shards(tmp_path) as reader:
        assert reader.read_int("updates") == 5 and reader.read_int("trained") == 1
        with pytest.raises(CheckpointError, match=r"shard_0\.json: skipped_in_a_row is None, not the number"):
            reader.read_int("skipped_in_a_row")
        with pytest.raises(CheckpointError, match="elements 0:14 of 'w' are in no shard"):
            reader.read_elements("exp_avg/w", make_slice(0, 14))
