#!/usr/bin/env bash
# Trains on all GPUs of one machine (or on 4 CPU processes); called again, it continues where the run was ended.
#
#   bash examples/cluster/torchrun.sh --preset 0.8B --data corpus --max-steps 10000 --fsdp --bf16
set -euo pipefail

run=${RUN:-run}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 4))}
resume=()
if [[ -f $run/run.json ]]; then resume=(--resume); fi

exec torchrun --standalone --nproc-per-node "$processes" --no-python \
    attnres train "$@" --output-dir "$run" "${resume[@]}"
