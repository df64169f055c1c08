#!/usr/bin/env bash
# GRPO on multi-turn GSM8K. Write the data first: uv run examples/gsm8k_multi_turn/gsm8k_multi_turn_dataset.py --output $HOME/data/gsm8k_multi_turn
#   NUM_GPUS=4 LOGGER=wandb examples/gsm8k_multi_turn/run_gsm8k_multi_turn.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/gsm8k_multi_turn}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name gsm8k_multi_turn \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
