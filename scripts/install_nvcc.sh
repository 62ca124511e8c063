#!/bin/sh
# Put the CUDA compiler of PyPI into a folder, for machines and images without one:
#   sh scripts/install_nvcc.sh PYTHON FOLDER
# PYTHON is any that has pip. Build with CUDA_HOME=FOLDER/nvidia/cu13; FOLDER is not needed
# afterwards, because the module is linked with the static runtime.
set -eu
"$1" -m pip install --quiet --target "$2" \
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
# nvcc looks for the static runtime where the toolkit's own installer puts it.
ln -sfn lib "$2/nvidia/cu13/lib64"
