#!/usr/bin/env bash
# Run the tests, setting up everything first: ./test.sh [--full [NAME]] [arguments of pytest].
# --full adds the tests marked matrix (whole products of cases); with a NAME it runs one product alone.
# One process a core, at most 4, each with rank pools of its own; TEST_PROCESSES=n chooses.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/setup_env.sh
# Rank pools run one process a rank: threads of their own would only fight over the cores.
export OMP_NUM_THREADS=1
# Each of many processes would compile the package and rewrite the assertions for itself.
unset PYTHONDONTWRITEBYTECODE
# The Python that has torch may have plugins too, which are not these tests'.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1

num_cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')
num_processes=${TEST_PROCESSES:-$((num_cores < 4 ? num_cores : 4))}
options=(-p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin)
options+=(--numprocesses "$num_processes" --dist worksteal --durations 20)
while [ $# -gt 0 ]; do
  if [ "$1" = --full ]; then
    # pytest would take a path that follows for the NAME.
    case "${2:-}" in
      "" | -* | */* | *.py) options+=(--full=all) ;;
      *)
        options+=("--full=$2")
        shift
        ;;
    esac
  else
    options+=("$1")
  fi
  shift
done
exec "$PYTHON" -m pytest "${options[@]}"
