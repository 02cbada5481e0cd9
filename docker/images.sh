#!/usr/bin/env bash
# Builds the images of this version and writes images/images.json: what was built from what. Needs bash
# and docker, and mmdebstrap unless a base is given. Run by `make images`.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
usage="usage: images.sh [--variant cpu|cuda] [--base name@sha256:...] [--mirror URI|FILE]
       [--network host] [--ca FILE] [--wheels FOLDER] [--pip-conf FILE]"
variant=cuda base='' mirror='' network='' ca='' wheels='' pip_conf=''
while [ $# -gt 0 ]; do
  case "$1" in
    --variant) variant="${2:?$usage}" ;;
    --base) base="${2:?$usage}" ;;
    --mirror) mirror="${2:?$usage}" ;;
    --network) network="${2:?$usage}" ;;
    --ca) ca="${2:?$usage}" ;;
    --wheels) wheels="${2:?$usage}" ;;
    --pip-conf) pip_conf="${2:?$usage}" ;;
    *) echo "$usage" >&2; exit 2 ;;
  esac
  shift 2
done
version="$(cat VERSION)"
inputs=docker/inputs

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }

# What is asked can be had.
docker version >/dev/null 2>&1 || fail "no Docker Engine answers" \
  "a running Docker Engine, 20.10 or newer" "start it; as root on Debian: bash docker/start-engine.sh"
case "$variant" in cpu | cuda) ;; *) fail "VARIANT=$variant" "cpu or cuda" "make images" ;; esac
for file in ${ca:+"$ca"} ${pip_conf:+"$pip_conf"}; do
  [ -f "$file" ] || fail "no file $file" "the file of CA or PIP_CONF" "make images, with its path"
done
[ -z "$wheels" ] || [ -d "$wheels" ] || fail "no folder $wheels" "a folder of wheels" \
  "make images WHEELS=its path"
if [ ! -e images ]; then mkdir images && touch images/.cleanslate; fi
[ -f images/.cleanslate ] || fail "images/ is there without the mark of this project" \
  "a folder that may be written into" "move it elsewhere, then: make images"
exec 9>images/.lock
flock --nonblock 9 || fail "images/ is in use by another build" "one build at a time" "wait for it"

# The inputs of this machine's network, for the build stages alone, and gone at the end.
empty_inputs() {
  rm -f -- "$inputs/ca.pem" "$inputs/pip.conf"
  if [ -d "$inputs/wheels" ]; then rm -f -- "$inputs"/wheels/*.whl; rmdir -- "$inputs/wheels"; fi
}
plain() { tr 'A-Z_.' 'a-z\-\-'; }
locks=(docker/trainer/requirements*.txt "docker/extractor/requirements-$variant.txt")
take_wheels() { # those of a folder that a lock wants; a build for the CPU only in the CPU variant
  local wheel name pinned
  pinned="$(sed -nE 's/^([A-Za-z0-9._-]+==[^ \]+).*/\1/p' "${locks[@]}" | plain)"
  for wheel in "$1"/*.whl; do
    name="$(basename "$wheel" | sed -E 's/^([^-]+)-([^-+]+).*/\1==\2/' | plain)"
    grep -qxF -- "$name" <<<"$pinned" || continue
    case "$variant$(basename "$wheel")" in cuda*+cpu-*) continue ;; esac
    mkdir -p "$inputs/wheels"
    cp -- "$wheel" "$inputs/wheels/"
  done
}
trap empty_inputs EXIT
empty_inputs
[ -z "$ca" ] || cp -- "$ca" "$inputs/ca.pem"
[ -z "$pip_conf" ] || cp -- "$pip_conf" "$inputs/pip.conf"
[ -z "$wheels" ] || take_wheels "$wheels"

# The bases: tags to build from, and what is recorded of them. Only the CUDA extractor compiles.
given_base() {
  [[ $base =~ ^[A-Za-z0-9./:_-]+@sha256:[0-9a-f]{64}$ ]] ||
    fail "BASE=$base names no digest" "name@sha256:..." "docker image inspect shows the digests"
  docker image inspect -- "$base" >/dev/null 2>&1 || docker pull --quiet -- "$base"
  ask() { docker run --rm --network none --entrypoint python3 -- "$base" -c "$1"; }
  ask 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || fail "BASE has no python3 of 3.11" \
    "Python 3.11, for which the packages are locked" "make images BASE=another, or without BASE"
  [ "$variant" = cpu ] || ask 'import os, shutil, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (shutil.which("g++") and os.path.isfile(header)))' ||
    fail "BASE lacks g++ or Python.h" "both: SGLang compiles kernels when it runs" \
      "make images BASE=another, or without BASE"
  local id
  id="$(docker image inspect --format '{{.Id}}' -- "$base")"
  trainer_base="$base" extractor_base="$base"
  base_facts="\"base\": {\"id\": \"$id\", \"given\": \"$base\"}"
}
own_bases() {
  local id layer line lists=(docker/base/packages.txt)
  line="$(MIRROR="$mirror" bash docker/base/build.sh "${lists[@]}")"
  read -r id layer trainer_base <<<"$line"
  extractor_base="$trainer_base"
  base_facts="\"base\": {\"id\": \"$id\", \"tar_sha256\": \"$layer\"}"
  [ "$variant" = cuda ] || return 0
  line="$(MIRROR="$mirror" bash docker/base/build.sh "${lists[@]}" docker/base/packages-jit.txt)"
  read -r id layer extractor_base <<<"$line"
  base_facts+=", \"extractor_base\": {\"id\": \"$id\", \"tar_sha256\": \"$layer\"}"
}

commit="$(git rev-parse HEAD 2>/dev/null || echo unknown)"
dirty="$([ -z "$(git status --porcelain 2>/dev/null)" ] && echo false || echo true)"
build() { # TARGET TAG: builds it and adds what was made to images_facts
  local log="images/$1.log" began=$SECONDS id bytes made="$variant"
  echo "images: building $2 (log: $log)"
  docker build ${network:+--network "$network"} --target "$1" --tag "$2" \
    --build-arg BASE="$trainer_base" --build-arg EXTRACTOR_BASE="$extractor_base" \
    --build-arg VARIANT="$variant" --build-arg VERSION="$version" --build-arg COMMIT="$commit" . \
    >"$log" 2>&1 || { tail -n 30 -- "$log" >&2; fail "$1 was not built" "an image" \
      "read $log; in a network that inspects TLS: make images CA=file; see docker/inputs/README.md"; }
  id="$(docker image inspect --format '{{.Id}}' -- "$2")"
  bytes="$(docker image inspect --format '{{.Size}}' -- "$2")"
  # The trainer's torch is for the CPU only where a wheel of that build was at hand.
  [ "$1" != trainer ] || made="$(docker run --rm --network none -- "$id" python -c 'import torch
print("cuda" if torch.version.cuda else "cpu")')"
  images_facts+="${images_facts:+, }\"$1\": {\"id\": \"$id\", \"variant\": \"$made\", \"bytes\": $bytes}"
  echo "images: $2, ${id:7:12}, $((bytes / 1000000)) MB, $((SECONDS - began)) s"
}

# One line a file that decides what is in an image, and one for the package as a whole.
input_facts() {
  local files=(Dockerfile .dockerignore VERSION pyproject.toml docker/setup.sh
    docker/setup-sglang-cpu.sh docker/with-inputs.sh)
  tree() { find "$@" -type f ! -path '*/__pycache__/*' ! -path '*.egg-info/*' | LC_ALL=C sort; }
  mapfile -t -O "${#files[@]}" files < <(tree docker/base docker/trainer docker/extractor)
  sha256sum -- "${files[@]}" | sed -E 's/^([0-9a-f]+)  (.*)/    "\2": "\1",/'
  printf '    "pipeline": "%s"\n' \
    "$(tree pipeline | tr '\n' '\0' | xargs -0 sha256sum -- | sha256sum | cut -d' ' -f1)"
}

began=$SECONDS images_facts='' taken="$(input_facts)"
if [ -n "$base" ]; then given_base; else own_bases; fi
echo "images: base $trainer_base, $((SECONDS - began)) s"
trainer="cleanslate-trainer:$version"
build trainer "$trainer"
suffix=''
[ "$variant" = cuda ] || suffix=-cpu
build extractor "cleanslate-extractor:$version$suffix"
[ "$(input_facts)" = "$taken" ] || fail "files changed while the images were built" \
  "one state of the tree in both images" "make images, again"
cat >images/images.json.partial <<END
{
  "version": "$version", "commit": "$commit", "dirty": $dirty,
  $base_facts,
  "images": {$images_facts},
  "inputs": {
$taken
  }
}
END
mv -- images/images.json.partial images/images.json
# The classic builder keeps build stages, 7 GB of them, as untagged images: its cache, for a day.
docker image prune --force --filter label=cleanslate.build --filter until=24h >/dev/null
echo "images: images/images.json written"
