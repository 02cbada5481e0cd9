#!/usr/bin/env bash
# Runs a command of an image's build with what docker/inputs holds: a certificate bundle, pip's
# configuration, wheels. Only build stages have that folder.
set -Eeuo pipefail
inputs="$(cd "$(dirname "$0")" && pwd)/inputs"

if [ -f "$inputs/ca.pem" ]; then
  export PIP_CERT="$inputs/ca.pem" SSL_CERT_FILE="$inputs/ca.pem" REQUESTS_CA_BUNDLE="$inputs/ca.pem"
fi
if [ -f "$inputs/pip.conf" ]; then export PIP_CONFIG_FILE="$inputs/pip.conf"; fi
if [ -d "$inputs/wheels" ]; then export PIP_FIND_LINKS="$inputs/wheels"; fi
export PIP_NO_CACHE_DIR=1 PIP_DEFAULT_TIMEOUT=180
exec "$@"
