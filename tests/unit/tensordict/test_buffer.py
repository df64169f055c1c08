from __future__ import annotations

import threading

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from skyrl_train.tensordict.buffer import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement


def rows(*numbers: int) -> TensorDictBase:
    """Ragged: row n holds n tokens n."""
    return lazy_stack([TensorDict({"tokens": {"full": torch.full((n,), n)}}) for n in numbers])


def numbers(batch: TensorDictBase) -> list[int]:
    return [int(row["tokens", "full"][0]) for row in batch.unbind(0)]


def test_each_row_is_sampled_once_before_any_is_again():
    buffer = ReplayBuffer(10, seed=0, batch_size=2)
    assert buffer.extend(rows(1, 2, 3)).tolist() == [0, 1, 2]
    buffer.extend(rows(4))
    assert sorted(numbers(buffer.sample()) + numbers(buffer.sample())) == [1, 2, 3, 4]
    buffer.sample(3)
    buffer.extend(rows(5))
    last = numbers(buffer.sample(5))  # two that were left, and three of the next pass: no row twice in a batch
    assert sorted(last) == [1, 2, 3, 4, 5]
    assert 5 in last


def test_the_oldest_rows_make_room():
    buffer = ReplayBuffer(2, shuffle=False)
    buffer.extend(rows(1, 2))
    buffer.add(rows(3)[0])
    assert len(buffer) == 2 and buffer.write_count == 3
    assert numbers(buffer.sample(2)) == [2, 3]
    buffer.empty()
    with pytest.raises(ValueError, match="batch_size=1, but only 0 rows are stored"):
        buffer.sample(1)


def test_a_pass_has_every_row_once_in_batches():
    buffer = ReplayBuffer(8, batch_size=2, seed=1)
    buffer.extend(rows(1, 2, 3, 4, 5))
    batches = list(buffer)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert sorted(n for batch in batches for n in numbers(batch)) == [1, 2, 3, 4, 5]
    dropping = ReplayBuffer(8, batch_size=2, drop_last=True)
    dropping.extend(rows(1, 2, 3))
    assert [len(batch) for batch in dropping] == [2]


def test_what_is_written_into_a_sample_does_not_reach_the_store():
    buffer = ReplayBuffer(2, shuffle=False, batch_size=1)
    written = rows(2)
    buffer.extend(written)
    sample = buffer.sample()
    for row in (*sample.unbind(0), *written.unbind(0)):
        row["tokens", "full"] = torch.zeros(2)
        row["tokens", "more"] = torch.zeros(2)
    again = buffer.sample()
    assert numbers(again) == [2]
    assert set(again[0]["tokens"].keys()) == {"full"}


def test_all_batch_sizes_are_rows():
    buffer = ReplayBuffer(8, shuffle=False)
    buffer.extend(TensorDict({"tokens": {"full": torch.arange(6).reshape(2, 3, 1)}}, batch_size=[2, 3]))
    assert numbers(buffer.sample(6)) == [0, 1, 2, 3, 4, 5]


class KeepsEven:
    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        kept = [row for row in tensordict.unbind(0) if len(row["tokens", "full"]) % 2 == 0]
        return lazy_stack(kept) if kept else None


def test_transforms_decide_what_is_stored():
    buffer = ReplayBuffer(8, shuffle=False).append_transform(KeepsEven())
    assert buffer.extend(rows(1, 3)).tolist() == []
    assert buffer.extend(rows(1, 2, 4)).tolist() == [0, 1]
    assert numbers(buffer.sample(2)) == [2, 4]


class Doubles:
    """Doubles tokens on the way out, halves them on the way in."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._times(tensordict, 2)

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._times(tensordict, 0.5)

    def _times(self, tensordict: TensorDictBase, factor: float) -> TensorDictBase:
        changed = [row.copy() for row in tensordict.unbind(0)]
        for row in changed:
            row["tokens", "full"] = row["tokens", "full"] * factor
        return lazy_stack(changed)


@pytest.mark.defect("replay-buffer-lacks-transforms")
def test_transforms_see_what_is_written_and_what_is_read():
    buffer = ReplayBuffer(8, shuffle=False, batch_size=2, transform=Doubles())
    buffer.extend(rows(2, 4))
    assert numbers(buffer.sample()) == numbers(next(iter(buffer))) == numbers(buffer[:]) == [2, 4]
    buffer.append_transform(lambda batch: batch.set("seen", torch.ones(len(batch))))
    assert buffer.sample()["seen"].tolist() == [1, 1]
    assert "seen" in buffer[0].keys()  # noqa: SIM118 - a tensordict
    inverted = ReplayBuffer(8, shuffle=False, batch_size=1).append_transform(Doubles(), invert=True)
    inverted.insert_transform(0, lambda batch: batch.set("before", numbers(batch)[0] * torch.ones(len(batch))))
    inverted.extend(rows(4))
    read = inverted.sample()
    assert numbers(read) == [4] and read["before"].tolist() == [8]
    for wrong in (3, Doubles):
        with pytest.raises(TypeError, match="no `inv`"):
            buffer.append_transform(wrong)


@pytest.mark.defect("replay-buffer-not-indexable")
def test_rows_can_be_read_by_place():
    buffer = ReplayBuffer(3)
    buffer.extend(rows(1, 2, 3, 4))
    assert numbers(buffer[:]) == [2, 3, 4]
    assert int(buffer[-1]["tokens", "full"][0]) == 4
    assert (
        numbers(buffer[1:]) == numbers(buffer[torch.tensor([1, 2])]) == numbers(buffer[[False, True, True]]) == [3, 4]
    )
    assert [len(row) for row in buffer[:].get(("tokens", "full"), as_list=True)] == [2, 3, 4]
    buffer.empty(empty_write_count=False)
    assert len(buffer) == 0 and buffer.write_count == 4
    buffer.empty()
    assert buffer.write_count == 0
    with pytest.raises(IndexError):
        buffer[:]
    buffer.extend(rows(1, 1))
    assert buffer["tokens", "full"].shape == (2, 1)


class ListStorage:
    """The shape of TorchRL's."""

    def __init__(self, max_size: int | None = None, held: int = 0):
        self.max_size, self.held = max_size, held

    def __len__(self) -> int:
        return self.held


@pytest.mark.defect("replay-buffer-lacks-storage")
def test_a_storage_says_how_many_rows_are_kept():
    for storage in (LazyStackStorage(2), ListStorage(2), lambda: ListStorage(2)):
        buffer = ReplayBuffer(storage=storage)
        buffer.extend(rows(1, 2, 3))
        assert len(buffer) == 2
    for endless in (ReplayBuffer(storage=LazyStackStorage()), ReplayBuffer(storage=LazyStackStorage)):
        endless.extend(rows(*range(1, 20)))
        assert len(endless) == 19
    for wrong in ({"storage": ListStorage(2, held=1)}, {"storage": 3}, {"max_size": 2, "sampler": object()}):
        with pytest.raises(ValueError, match=r"storage|sampler"):
            ReplayBuffer(**wrong)


def test_threads_may_write_while_others_sample():
    buffer = ReplayBuffer(16, batch_size=3)
    buffer.extend(rows(1, 1, 1))

    def write() -> None:
        for _ in range(40):
            buffer.extend(rows(1, 2))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    for _ in range(40):
        assert len(buffer.sample()) == 3
    for writer in writers:
        writer.join()
    assert buffer.write_count == 3 + 3 * 40 * 2 and len(buffer) == 16


@pytest.mark.parametrize(("arguments", "message"), [((0,), "max_size=0"), ((2,), "batch_size=None")])
def test_sizes_are_checked(arguments: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(*arguments).sample()


def test_torchrls_storage_and_sampler_say_the_same():
    buffer = ReplayBuffer(
        storage=LazyStackStorage(3), sampler=SamplerWithoutReplacement(drop_last=True, shuffle=False), batch_size=2
    )
    for number in range(4):
        buffer.add(TensorDict(number=torch.tensor(number)))
    assert [batch["number"].tolist() for batch in buffer] == [[1, 2]]
    for size, storage in ((None, None), (3, LazyStackStorage(3))):
        with pytest.raises(ValueError, match="give exactly one of the two"):
            ReplayBuffer(size, storage=storage)
    for sampler in (SamplerWithoutReplacement, lambda: SamplerWithoutReplacement(shuffle=True)):
        assert len(ReplayBuffer(3, sampler=sampler)) == 0
    with pytest.raises(ValueError, match="only SamplerWithoutReplacement"):
        ReplayBuffer(3, sampler=dict)
