#!/usr/bin/env bash
# Runs a preset of this folder; works from any folder: EXTRA=vllm NUM_GPUS=4 LOGGER=wandb examples/algorithms/run.sh dapo [key=value ...]
# EXTRA installs a GPU engine, vllm or sglang; omit it on a CPU.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
preset="${1:?name a preset, one of: $(cd "$here" && echo *.yaml | sed 's/\.yaml//g')}"
shift
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # custom_loss.py and custom_advantage.py
NUM_GPUS="${NUM_GPUS:-1}"

uv run --project "$here/../.." ${EXTRA:+--extra "$EXTRA"} -m skyrl_train.entrypoints.main_base \
  --config-dir "$here" --config-name "$preset" \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS" \
  trainer.placement.ref_num_gpus_per_node="$NUM_GPUS" \
  generator.num_inference_engines="$NUM_GPUS" \
  trainer.logger="${LOGGER:-console}" \
  "$@"
