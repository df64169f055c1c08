from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import CheckpointError
from skyrl_train.strategies.checkpoint_shards import CheckpointShard, ParameterSlice, open_shards

WHOLE = torch.arange(14.0)
META = {"world_size": 3, "updates": 5, "trained": True}


def piece(start: int, stop: int) -> ParameterSlice:
    return ParameterSlice((7, 2), "float32", start, stop)


def write(folder: Path, cuts: list[tuple[int, int]]) -> None:
    for rank, (start, stop) in enumerate(cuts):
        meta = {**META, "world_size": len(cuts)}
        CheckpointShard(rank, {"w": piece(start, stop)}, {"param/w": WHOLE[start:stop]}, meta).write(folder)


@pytest.mark.parametrize(
    "cuts",
    [
        [(0, 14)],
        [(0, 6), (6, 12), (12, 14)],
        [(0, 5), (5, 9), (9, 14)],  # in the middle of rows
        [(0, 8), (8, 14), (14, 14)],  # more ranks than rows leave some with none
        [(0, 8), (8, 14), (0, 8), (8, 14)],  # replicas hold the same twice
    ],
)
@pytest.mark.parametrize("wanted", [(0, 14), (4, 10), (7, 8), (14, 14), (0, 1)])
def test_elements_come_from_whichever_ranks_saved_them(
    tmp_path: Path, cuts: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    write(tmp_path, cuts)
    with open_shards(tmp_path) as reader:
        reader.check_parameters({"w": piece(0, 14)})
        assert torch.equal(reader.read_elements("param/w", piece(*wanted)), WHOLE[slice(*wanted)])


def test_a_tensor_is_flat_in_the_file_whatever_its_layout(tmp_path: Path) -> None:
    CheckpointShard(0, {"w": piece(0, 14)}, {"param/w": WHOLE.view(2, 7).T}, {**META, "world_size": 1}).write(tmp_path)
    with open_shards(tmp_path) as reader:
        assert torch.equal(reader.read_elements("param/w", piece(0, 14)).view(7, 2), WHOLE.view(2, 7).T)


def test_ranks_write_files_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, [(0, 8), (8, 14)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"shard_{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    ]


@pytest.mark.parametrize("file", ["shard_1.json", "shard_1.safetensors", "shard_0.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_torn_checkpoint_is_reported_by_file(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path, [(0, 8), (8, 14)])
    path = tmp_path / file
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=file), open_shards(tmp_path):
        pass


def test_elements_that_nobody_saved_are_reported(tmp_path: Path) -> None:
    write(tmp_path, [(0, 3), (4, 14)])
    with open_shards(tmp_path) as reader, pytest.raises(CheckpointError, match="elements 3:14 of 'w'"):
        reader.read_elements("param/w", piece(0, 14))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (
            {"w": ParameterSlice((7, 3), "float32", 0, 21)},
            r"'w' is float32 \[7, 2\] in the checkpoint and float32 \[7, 3\]",
        ),
        ({"w": ParameterSlice((7, 2), "bfloat16", 0, 14)}, r"bfloat16 \[7, 2\] in the model"),
        ({"w": piece(0, 14), "more": piece(0, 14)}, "'more' is absent in the checkpoint"),
        ({}, "absent in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, slices: dict[str, ParameterSlice], message: str
) -> None:
    write(tmp_path, [(0, 14)])
    with open_shards(tmp_path) as reader, pytest.raises(CheckpointError, match=message):
        reader.check_parameters(slices)


def test_the_json_says_what_is_where(tmp_path: Path) -> None:
    write(tmp_path, [(0, 8), (8, 14)])
    said = json.loads((tmp_path / "shard_1.json").read_text())
    assert said == {
        **{"world_size": 2, "updates": 5, "trained": True, "rank": 1},
        "slices": {"w": {"shape": [7, 2], "dtype": "float32", "start": 8, "stop": 14}},
    }


@pytest.mark.defect("forged-states-of-runs")
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
def test_json_that_no_rank_has_saved_is_named_with_its_file_and_key(
    tmp_path: Path, rank: int, changes: dict[str, Any]
) -> None:
    write(tmp_path, [(0, 8), (8, 14)])
    path = tmp_path / f"shard_{rank}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (key,) = changes
    with pytest.raises(CheckpointError, match=rf"shard_{rank}\.json: {key} (is|are) .*not "), open_shards(tmp_path):
        pass


@pytest.mark.defect("forged-states-of-runs")
def test_tensors_that_only_the_json_names_are_in_no_shard(tmp_path: Path) -> None:
    write(tmp_path, [(0, 8), (8, 14)])
    with open_shards(tmp_path) as reader:
        assert reader.read_int("updates") == 5 and reader.read_int("trained") == 1
        with pytest.raises(CheckpointError, match=r"shard_0\.json: skipped_in_a_row is None, not the number"):
            reader.read_int("skipped_in_a_row")
        with pytest.raises(CheckpointError, match="elements 0:14 of 'w' are in no shard"):
            reader.read_elements("exp_avg/w", piece(0, 14))
