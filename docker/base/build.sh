#!/usr/bin/env bash
# Builds a base image from Debian packages and loads it into Docker. Twice from the same state of the
# mirror gives the same tar and the same image id. Debian bookworm, because its python3 is 3.11, for
# which the packages are locked.
# Prints one line: image id, sha256 of the layer's tar, tag. PACKAGES: files that list packages.
# MIRROR (a URI or a file of apt sources): where from; unset, what this machine's own apt uses.
set -Eeuo pipefail
: "${1:?usage: build.sh PACKAGES...}"
suite=bookworm
# 2026-11-29: every file younger than this gets this date.
export SOURCE_DATE_EPOCH=1795910400

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }

command -v mmdebstrap >/dev/null || fail "no mmdebstrap on this machine, and no BASE" \
  "mmdebstrap, or an image with Python 3.11 by digest" \
  "apt-get install mmdebstrap, or: make images BASE=name@sha256:..."
scratch="$(mktemp -d)"
trap 'rm -f -- "$scratch"/*; rmdir -- "$scratch"' EXIT

mirror="${MIRROR:-$scratch/sources.list}"
if [ -z "${MIRROR:-}" ]; then
  # The mirror stays out of the image, so that two mirrors of one state give one digest.
  # shellcheck disable=SC2016  # apt's own placeholders
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' | grep -E " $suite(-updates|-security)? main\$" | sort -u >"$mirror" ||
    fail "this machine's apt knows no Debian $suite" "a mirror of Debian $suite" \
      "make images MIRROR=the mirror's address"
fi
include="$(sed -E '/^(#|$)/d' "$@" | sort -u | paste -sd,)"
# shellcheck disable=SC2016  # mmdebstrap's own $1, the folder of the new system
mmdebstrap --quiet --variant=essential --include="$include" \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  --customize-hook='find "$1" -xdev -perm /6000 -exec chmod ug-s -- {} +' \
  --customize-hook='rm -f -- "$1/etc/apt/sources.list" "$1"/etc/apt/sources.list.d/0000* "$1/etc/resolv.conf" "$1/etc/hostname"' \
  "$suite" "$scratch/layer.tar" "$mirror" >&2

layer="$(sha256sum "$scratch/layer.tar" | cut -d' ' -f1)"
created="$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)"
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
printf '{"architecture":"%s","os":"linux","created":"%s","config":{"Env":["PATH=%s"],%s},%s,%s}' \
  "$(dpkg --print-architecture)" "$created" "$path" \
  '"Cmd":["bash"],"Labels":{"cleanslate.image":"base"}' \
  "\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$layer\"]}" \
  "\"history\":[{\"created\":\"$created\",\"created_by\":\"docker/base/build.sh $include\"}]" \
  >"$scratch/config.json"
id="$(sha256sum "$scratch/config.json" | cut -d' ' -f1)"
tag="cleanslate-base:${id:0:12}"
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$tag" \
  >"$scratch/manifest.json"
tar -C "$scratch" -cf "$scratch/image.tar" manifest.json config.json layer.tar
docker load --quiet --input "$scratch/image.tar" >&2
loaded="$(docker image inspect --format '{{.Id}}' "$tag")"
echo "$loaded $layer $tag"
