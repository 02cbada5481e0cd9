#!/usr/bin/env bash
# Makes the virtual environment of the SGLang server for machines without a GPU: hash-locked
# packages, the pure-torch stand-in for SGLang's CPU kernels, and this package (its capture plugin).
# An image installs the last two by itself, in a layer of their own.
set -Eeuo pipefail
usage="usage: setup-sglang-cpu.sh PYTHON VENV [editable|packages-only]"
python="${1:?$usage}" venv="${2:?$usage}" package="${3:-editable}"
requirements=docker/extractor/requirements-cpu.txt

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }

command -v "$python" >/dev/null || python=python3
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
[ "$version" = 3.11 ] || fail "$python is Python $version" "Python 3.11, for which the packages are \
locked" "make sglang-cpu PYTHON=/path/to/python3.11"

echo "set-up: installing SGLang for the CPU into $venv (6.4 GB, once; log: $venv/setup.log)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip_install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --no-deps "$@" \
    >>"$venv/setup.log" 2>&1
}
# A build of torch in find-links first: given hashes, pip would prefer the index's to it.
sed -n '/^torch==/,/[^\\]$/p' "$requirements" >"$venv/torch.txt"
pip_install --require-hashes --no-index -r "$venv/torch.txt" || true
pip_install --require-hashes -r "$requirements" ||
  fail "pip could not install: $(grep ERROR "$venv/setup.log" | tail -n 2)" \
    "every locked package of $requirements" "read $venv/setup.log; check the network"
if [ "$package" = editable ]; then
  for project in docker/extractor/cpu .; do
    pip_install --no-build-isolation --editable "$project" ||
      fail "$project does not install" "a whole checkout" "read $venv/setup.log"
  done
fi
touch "$venv/ready"
echo "set-up: done, SGLang $("$venv/bin/python" -c \
  'import importlib.metadata as m; print(m.version("sglang"), "with torch", m.version("torch"))')"
