#!/usr/bin/env bash
# Runs a multi-node training job on SLURM: sbatch examples/clusters/slurm.sh [key=value ...]
# Submit it from the clone, on a disk that all nodes share; see docs/guides/clusters.md.
#SBATCH --job-name=skyrl-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --no-kill
set -euo pipefail

export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k}"
GPUS="${SLURM_GPUS_ON_NODE:-0}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun does not inherit it from sbatch, and would give Ray one core
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')" # only for this job; srun passes it to the nodes
export RAY_AUTH_TOKEN
if [ -n "${INTERFACE:-}" ]; then # the interface of the fast network, if nodes have several
  export NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"
fi

port=$((20000 + SLURM_JOB_ID % 10000)) # another job's Ray may run on a shared node
# shellcheck disable=SC2016 # the shell on each node expands it
own_address='$(hostname --ip-address | cut -d" " -f1)'
head="$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" bash -c "echo $own_address")"
export RAY_ADDRESS="$head:$port"

steps=()
start_ray() { # NODE ARGUMENTS: start Ray in a job step that ends with this script
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" \
    bash -c "exec env -u RAY_ADDRESS ray start --block --disable-usage-stats --num-gpus=$GPUS --node-ip-address=$own_address ${*:2}" &
  steps+=($!)
}
trap 'kill "${steps[@]}" 2>/dev/null; wait "${steps[@]}" 2>/dev/null || true' EXIT

start_ray "${nodes[0]}" --head --port="$port" --include-dashboard=false --temp-dir="${TMPDIR:-/tmp}/ray-$SLURM_JOB_ID"
for ((tries = 60; tries > 0; tries--)); do
  ray health-check --address="$RAY_ADDRESS" >/dev/null 2>&1 && break
  sleep 2
done
for node in "${nodes[@]:1}"; do start_ray "$node" --address="$RAY_ADDRESS"; done

python - "${#nodes[@]}" <<'PY' # a run fails if it starts before all nodes have joined
import sys, time
import ray

expected, deadline = int(sys.argv[1]), time.monotonic() + 300
ray.init(log_to_driver=False, logging_level="ERROR")
while (alive := sum(node["Alive"] for node in ray.nodes())) < expected:
    if time.monotonic() > deadline:
        sys.exit(f"{alive} of {expected} nodes have joined {ray.get_runtime_context().gcs_address} in 300 s.")
    time.sleep(1)
print(f"{alive} nodes, {ray.cluster_resources().get('GPU', 0):g} GPUs", flush=True)
PY

per_node=$((GPUS > 0 ? GPUS : 1))
python -m skyrl_train.entrypoints.main_base \
  --config-dir examples/gsm8k --config-name gsm8k \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.placement.policy_num_nodes="${#nodes[@]}" \
  trainer.placement.policy_num_gpus_per_node="$per_node" \
  trainer.placement.ref_num_nodes="${#nodes[@]}" \
  trainer.placement.ref_num_gpus_per_node="$per_node" \
  generator.num_inference_engines="$((${#nodes[@]} * per_node))" \
  trainer.logger="${LOGGER:-console}" \
  trainer.timeouts.upload_s=300 \
  "$@" &
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null' TERM # the run saves the last step, and the same command resumes from it
out_of_time=
trap 'out_of_time=yes; kill -TERM "$driver" 2>/dev/null' USR1 # --signal sends it ten minutes before the time limit
status=0
while kill -0 "$driver" 2>/dev/null; do
  status=0
  wait "$driver" || status=$?
done
if [ -n "$out_of_time" ] && [ "$status" -eq 143 ]; then # the run has saved; --requeue alone only covers lost nodes and preemption
  scontrol requeue "$SLURM_JOB_ID"                           # ends this job and queues it again
fi
exit "$status"
