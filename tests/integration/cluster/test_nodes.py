"""Several Ray nodes: placement of slots, files that nodes see, and the loss of a node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.support.ray_nodes import ray_nodes


@pytest.mark.defect("autoscaling-cluster-rejected")
def test_placement_and_loss_of_nodes(tmp_path: Path):
    folders = [tmp_path / name for name in ("a", "b", "c", "driver")]
    for folder in folders:
        folder.mkdir()
    for folder in (folders[0], folders[-1]):
        (folder / "one-node-lacks-it").touch()
    (folders[1] / "one-node-has-it").touch()
    roles = [{"role": "trainer"}, {"role": "trainer"}, {"role": "engine"}]
    with ray_nodes([{}, {}, {}], cpus=[2, 2, 2], labels=roles, folders=[str(folder) for folder in folders]) as nodes:
        program = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.cluster.on_nodes"],
            env=os.environ | nodes.environment | {"PYTHONPATH": str(REPOSITORY)},
            cwd=folders[-1],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        with program, program.stdout:
            lines = []
            for line in program.stdout:
                lines.append(line)
                if line.startswith("KILL "):
                    nodes.kill(nodes.addresses.index(line.split()[1]))
        assert program.returncode == 0, "".join(lines)
