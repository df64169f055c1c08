from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from skyrl_train.cluster import addresses
from skyrl_train.cluster.addresses import free_address, listen

LAST = 2**16 - 1


def ephemeral_to(last: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "ip_local_port_range"
    file.write_text(f"32768\t{last}\n")
    monkeypatch.setattr(addresses, "EPHEMERAL_PORTS_FILE", file)


@pytest.mark.defect("rendezvous-port-taken")
def test_free_port_is_above_ephemeral_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for last in (60999, 65500):
        ephemeral_to(last, tmp_path, monkeypatch)
        assert last < min(free_address()[1] for _ in range(20))
    monkeypatch.undo()
    kernels = addresses.EPHEMERAL_PORTS_FILE
    if kernels.exists() and (last := int(kernels.read_text().split()[1])) <= 65500:
        assert last < min(free_address()[1] for _ in range(20)), "the kernel's own file is not read"


def test_any_free_port_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ephemeral_to(LAST - 1, tmp_path, monkeypatch)
    with closing(listen("127.0.0.1", LAST)):
        assert 0 < free_address()[1] < LAST
    for file in (tmp_path / "none", tmp_path / "ip_local_port_range"):
        ephemeral_to(LAST, tmp_path, monkeypatch)
        monkeypatch.setattr(addresses, "EPHEMERAL_PORTS_FILE", file)
        assert free_address()[1] > 0


def test_simultaneous_callers_get_different_ports():
    assert len({free_address()[1] for _ in range(20)}) > 15


def test_foreign_address_has_no_free_port():
    with pytest.raises(OSError, match="assign"):
        free_address("192.0.2.1")
