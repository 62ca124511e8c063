#!/usr/bin/env bash
# On a machine with one GPU: build the extensions, run the tests marked gpu, run the GPU benchmarks.
# Uses the machine's own Python, torch and pybind11; needs no network. Under 10 minutes.
# With OUT set, records are copied to that folder too.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
"$python" setup.py --quiet build_ext --inplace
if "$python" -c 'import pytest, hypothesis, pytest_timeout' 2>/dev/null; then
  "$python" -m pytest -q -m gpu tests
else
  echo "pytest, hypothesis or pytest-timeout is missing: the tests marked gpu were not run" >&2
fi
"$python" -m benchmarks adam --device cuda --numel 134217728 --repeats 20
"$python" -m benchmarks fsdp_step --ranks 1 --repeats 10
"$python" -m benchmarks fsdp_step --ranks 1 --repeats 10 --layers 24 --hidden 2048 \
  --sequence 2048 --batch 4 --vocabulary 32768 --dtypes bf16 --records benchmarks/records/large
"$python" -m benchmarks offload --fractions 0.5 1 --repeats 3
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT/records" && cp -r benchmarks/records/. "$OUT/records/"
fi
