#!/usr/bin/env bash
# Makes the virtual environment: hash-locked packages, and torch's CUDA libraries only when the
# build of torch that pip chose asks for them (a CPU build in pip's find-links does not). The package
# itself comes from this folder, editable; an image installs it by itself, in a layer of its own.
set -Eeuo pipefail
usage="usage: setup.sh PYTHON VENV REQUIREMENTS [editable|packages-only]"
python="${1:?$usage}" venv="${2:?$usage}" requirements="${3:?$usage}" package="${4:-editable}"

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }

command -v "$python" >/dev/null || python=python3
command -v "$python" >/dev/null || fail "no python3 in PATH" "Python 3.11" "make setup PYTHON=/path"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ "$version" = 3.11 ] || fail "$python is Python $version" "Python 3.11, for which the packages are \
locked" "make setup PYTHON=/path/to/python3.11"

echo "set-up: installing into $venv (once; the log of pip is $venv/setup.log)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    --require-hashes --no-deps "$@" >>"$venv/setup.log" 2>&1
}
install() {
  pip_install -r "$1" ||
    fail "pip could not install $1: $(grep -E 'ERROR' "$venv/setup.log" | tail -n 2)" \
      "every locked package" "read $venv/setup.log; check the network and pip config list"
}
torch="${requirements%.txt}-torch.txt"
# A wheel in find-links first: given hashes, pip would prefer the index's CUDA build to it.
pip_install --no-index -r "$torch" || install "$torch"
install "$requirements"
if "$venv/bin/python" -c '
import importlib.metadata, sys
needs = importlib.metadata.requires("torch") or []
sys.exit(not any(need.startswith(("nvidia-", "cuda-")) for need in needs))'; then
  echo "set-up: this build of torch wants CUDA libraries: installing them"
  install "${requirements%.txt}-cuda.txt"
fi
if [ "$package" = editable ]; then
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable . \
    >>"$venv/setup.log" 2>&1 || fail "the package itself does not install" "a whole checkout" \
    "read $venv/setup.log"
fi
touch "$venv/ready"
echo "set-up: done, $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
