#!/usr/bin/env bash
# GRPO on SkyRL-SQL. Write the data first: uv run examples/text2sql/text2sql_dataset.py --output $HOME/data/sql
#   NUM_GPUS=4 LOGGER=wandb examples/text2sql/run_text2sql.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/sql}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name text2sql \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.skyrl_gym.text2sql.db_path="${DB_PATH:-$DATA_DIR/db_files/data}" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
