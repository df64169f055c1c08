#!/usr/bin/env bash
# GRPO with searches. Write the data first: uv run examples/search/search_dataset.py --output $HOME/data/search
#   CORPUS=corpus.jsonl NUM_GPUS=4 LOGGER=wandb examples/search/run_search.sh [key=value ...]
set -euo pipefail
DATA_DIR="${DATA_DIR:-$HOME/data/search}"
NUM_GPUS="${NUM_GPUS:-1}"

uv run --extra search -m skyrl_train.entrypoints.main_base \
  --config-dir "$(dirname "$0")" --config-name search \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.skyrl_gym.search.corpus="${CORPUS:-null}" \
  environment.skyrl_gym.search.search_url="${SEARCH_URL:-http://127.0.0.1:8000/retrieve}" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
