#!/usr/bin/env bash
# A recipe of this folder: NUM_GPUS=4 LOGGER=wandb examples/algorithms/run.sh dapo [key=value ...]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
recipe="$1"
shift
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"  # custom_loss.py and custom_advantage.py
NUM_GPUS="${NUM_GPUS:-1}"

uv run -m skyrl_train.entrypoints.main_base \
  --config-dir "$here" --config-name "$recipe" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
