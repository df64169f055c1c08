#!/usr/bin/env bash
# GRPO on tasks of reasoning_gym. Write the data first: see README.md
#   NUM_GPUS=4 LOGGER=wandb examples/reasoning_gym/run_reasoning_gym.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/reasoning_gym}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run --extra reasoning_gym -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name reasoning_gym \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
