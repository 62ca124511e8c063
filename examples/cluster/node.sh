#!/usr/bin/env bash
# Start the ranks of one machine, and pass SIGTERM on to them: they save a checkpoint and exit 0.
#   node.sh [--config FILE] [--section.field value ...]
# torchrun reads the cluster's settings from PET_NNODES, PET_NPROC_PER_NODE, PET_RDZV_BACKEND,
# PET_RDZV_ENDPOINT, PET_RDZV_ID, PET_MAX_RESTARTS and PET_LOG_DIR. slurm.sbatch sets them, and so does
# Kubeflow's training operator. PYTHON names the Python; the options are those of megafsdp train.
set -euo pipefail
python=${PYTHON:-python}

# With torchrun's shared store a machine that comes back waits for an address in vain (docs/cluster.md).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# How long ranks may save after a SIGTERM to torchrun itself, before it kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Job control puts torchrun in a process group of its own, so that a signal reaches only this script:
# torchrun itself would answer it with a failure.
set -m
"$python" -m torch.distributed.run -m megafsdp train "$@" </dev/null &
launcher=$!

is_interrupted=
interrupt() {
  is_interrupted=1
  pkill -TERM -P "$launcher" || kill -TERM "$launcher"
}
trap interrupt TERM INT

status=0
while :; do
  is_interrupted=
  wait "$launcher" && status=0 || status=$?
  # A signal ends the wait, not the ranks.
  [ -n "$is_interrupted" ] || break
done
exit "$status"
