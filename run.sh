#!/usr/bin/env bash
# Pretrain the quick start model, setting up everything first, and draw its report; started again it
# resumes.
#   ./run.sh [--fresh] [--section.field value ...]
# --fresh starts over; the rest overrides examples/configs/quickstart.yaml. One rank a GPU, or 2 on
# CPU; NPROC=n chooses. SIGTERM, SIGINT and SIGHUP make the job save a checkpoint and exit 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh

run=runs/quickstart
options=(--config examples/configs/quickstart.yaml)
is_fresh=
is_question=
for argument in "$@"; do
  case "$argument" in
    -h | --help | --print-config | --dry-run | --dry-run=*) is_question=1 ;;
  esac
  if [ "$argument" = --fresh ]; then
    is_fresh=1
  else
    options+=("$argument")
  fi
done
# An answer needs neither data nor ranks, and removes nothing.
if [ -n "$is_question" ]; then
  exec "$PYTHON" -m megafsdp train "${options[@]}"
fi

# Where the run lies may stand in an option or in a file of --config. A mistake in them is said here,
# once; ranks and their launcher would each repeat it.
directory=$("$PYTHON" -c 'import sys
from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import parse_config
try:
    print(parse_config(sys.argv[1:]).run.directory)
except ConfigError as error:
    print(f"run.sh: ConfigError: {error}", file=sys.stderr)
    sys.exit(2)' "${options[@]}")

num_gpus=0
if command -v nvidia-smi >/dev/null; then
  num_gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
fi
if [ "$num_gpus" -eq 0 ]; then
  export OMP_NUM_THREADS=1
fi
num_ranks=${NPROC:-$((num_gpus > 0 ? num_gpus : 2))}

if [ -n "$is_fresh" ]; then
  WORLD_SIZE="$num_ranks" "$PYTHON" scripts/start_over.py "${options[@]}"
fi

if [ ! -e "$run/data/meta.json" ]; then
  "$PYTHON" -m megafsdp prep --stdlib --output "$run/data"
fi

# Job control puts the launcher in a process group of its own. A signal then reaches only this script,
# which passes it to the ranks: they save and exit 0, and the launcher with them. The launcher itself
# would answer a signal with a failure.
set -m
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$num_ranks" \
  -m megafsdp train "${options[@]}" </dev/null &
launcher=$!

is_interrupted=
was_interrupted=
interrupt() {
  is_interrupted=1
  was_interrupted=1
  pkill -TERM -P "$launcher" || kill -TERM "$launcher"
}
trap interrupt TERM INT HUP

status=0
while :; do
  is_interrupted=
  wait "$launcher" && status=0 || status=$?
  [ -n "$is_interrupted" ] || break
done

trap - TERM INT HUP
# A run that was told to stop ends at once; the next start draws it.
if [ "$status" -eq 0 ] && [ -z "$was_interrupted" ]; then
  "$PYTHON" -m megafsdp report "$directory" || status=$?
fi
exit "$status"
