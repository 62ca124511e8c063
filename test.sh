#!/usr/bin/env bash
# Run the tests, setting up everything first: ./test.sh [--full] [arguments of pytest].
# --full adds the tests marked matrix (whole products of cases).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh
# Rank pools run one process a rank: threads of their own would only fight over the cores.
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest "$@"
