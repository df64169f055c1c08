"""The interfaces on which ranks listen, as the operating system reports them."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from skyrl_train.cluster.addresses import free_address
from skyrl_train.strategies.process_group import close_process_group, init_process_group, make_subgroups
from skyrl_train.weight_sync.broadcast import ROOT_RANK, BroadcastGroup
from tests.support.machine_speed import network_address
from tests.support.rank_processes import run_ranks


def join_and_list_sockets(rank: int, host: str, ports: tuple[int, int, int], output: str) -> None:
    init_process_group(rank, 2, "127.0.0.1", ports[2], "gloo", 60.0)
    close_process_group()  # an earlier group of the same process, at another address
    init_process_group(rank, 2, host, ports[0], "gloo", 60.0)
    make_subgroups(2, 60.0)
    weights = BroadcastGroup(f"{host}:{ports[1]}", rank, 2, "cpu", 60.0)
    sent = torch.full((3,), 7.0) if rank == ROOT_RANK else torch.zeros(3)
    weights.broadcast(sent)
    assert sent.tolist() == [7.0] * 3
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    Path(output).write_text(json.dumps(listening))
    dist.barrier()
    weights.close()
    close_process_group()


@pytest.mark.defect("stores-listen-on-all-interfaces")
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_listen_only_on_the_given_host(nodes: int, tmp_path: Path):
    host = "127.0.0.1" if nodes == 1 else network_address()
    ports = (free_address(host)[1], free_address(host)[1], free_address()[1])
    outputs = [tmp_path / f"rank {rank}" for rank in range(2)]
    run_ranks(join_and_list_sockets, [(rank, host, ports, str(outputs[rank])) for rank in range(2)], tmp_path)
    root, other = (json.loads(file.read_text()) for file in outputs)
    assert {*ports[:2]} <= {port for _, port in root}
    assert {address for address, _ in [*root, *other]} == {host}
