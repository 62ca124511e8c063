# Sourced from the root of the checkout by run.sh, test.sh and .ci/run; leaves $PYTHON, a Python with
# megafsdp and all it needs. A second call costs one checksum.
#
# PYTHON=/path/to/python chooses the Python that .venv is made from. If it has torch in a version that
# megafsdp supports, as on a machine with GPUs, .venv uses that torch and installs none.

setup_key() {
  {
    printf '%s\n' "$PWD" "${PYTHON:-}"
    find setup.py pyproject.toml constraints.txt scripts/setup_env.sh megafsdp/csrc -type f |
      LC_ALL=C sort | xargs cksum
  } | cksum
}

has_supported_torch() {
  "$1" -c 'import sys, torch; sys.exit(not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16))' \
    >/dev/null 2>&1
}

# Distributions optimise their Python by profiles; version managers compile without, a third slower.
# Kernels are built with the headers, which a distribution has in a package of their own.
has_headers() {
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1
}

find_python() {
  local candidate found= names="python3.12 python3.11 python3.10 python3.13 python3.14 python3"
  for candidate in ${PYTHON:-$(printf '/usr/bin/%s ' $names) $names}; do
    "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
      >/dev/null 2>&1 || continue
    if has_supported_torch "$candidate"; then
      found=$candidate
      break
    fi
    [[ $candidate != /usr/bin/* ]] || has_headers "$candidate" || continue
    found=${found:-$candidate}
  done
  if [ -z "$found" ]; then
    echo "set-up: expected Python 3.10 or newer with the venv module, found none among:" \
      "${PYTHON:-$names}. Install one, or set PYTHON to its path." >&2
    return 1
  fi
  echo "$found"
}

make_venv() {
  local base
  base=$(find_python)
  rm -rf .venv
  "$base" -m venv .venv
  if has_supported_torch "$base"; then
    echo "set-up: .venv from $base, with its own torch"
    # Not by venv's own option: if the base is a virtual environment, it takes the system's packages.
    "$base" -c 'import sys
for path in sys.path:
    if path.endswith("-packages"):
        print(f"import site; site.addsitedir({path!r})")' \
      >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  else
    echo "set-up: .venv from $base"
  fi
}

install() {
  local constraints=.venv/constraints.txt torch_version
  if has_supported_torch .venv/bin/python; then
    # From the package's metadata: torch.__version__ may add the CUDA version, which pip does not know.
    torch_version=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')
  else
    torch_version=$(sed -n 's/^torch==//p' constraints.txt)
  fi
  { grep -v '^torch==' constraints.txt && echo "torch==$torch_version"; } >"$constraints"
  echo "set-up: installing torch $torch_version and the packages of constraints.txt"
  .venv/bin/python -m pip install --quiet --constraint "$constraints" \
    "torch==$torch_version" setuptools wheel pybind11
  # A module left by an earlier build would hide a failure of this one.
  rm -f megafsdp/_csrc*.so megafsdp/_cuda*.so
  .venv/bin/python -m pip install --quiet --constraint "$constraints" --no-build-isolation \
    --editable '.[dev]'
  if ! ls megafsdp/_csrc*.so >/dev/null 2>&1; then
    echo "set-up: no native kernels, for want of a working C++17 compiler: gradient sums on CPU run in" \
      "torch, slower but equal in every bit"
  fi
}

setup_env() {
  local stamp=.venv/megafsdp-setup key
  key=$(setup_key)
  if [ ! -x .venv/bin/python ] || [ "$(cat $stamp 2>/dev/null)" != "$key" ]; then
    .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
    install
    echo "$key" >$stamp
  fi
  PYTHON=$PWD/.venv/bin/python
}

setup_env
