#!/usr/bin/env bash
# GRPO on MATH. Write the data first: uv run examples/math/math_dataset.py --output $HOME/data/math
#   NUM_GPUS=4 LOGGER=wandb examples/math/run_math.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/math}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run --extra math -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name math \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
