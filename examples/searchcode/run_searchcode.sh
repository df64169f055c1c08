#!/usr/bin/env bash
# GRPO with searches and programs. Write the data first: uv run examples/searchcode/searchcode_dataset.py --output $HOME/data/searchcode
#   CORPUS=corpus.jsonl NUM_GPUS=4 LOGGER=wandb examples/searchcode/run_searchcode.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/searchcode}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run --extra search --extra sandbox -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name searchcode \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.skyrl_gym.searchcode.corpus="${CORPUS:-null}" \
  environment.skyrl_gym.searchcode.search_url="${SEARCH_URL:-http://127.0.0.1:8000/retrieve}" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
