#!/usr/bin/env bash
# Gives a running Docker Engine: nothing to do where one answers; else, as root on Debian, installs
# it and starts it in the background. For CI and machines without an init that would.
set -Eeuo pipefail
log=/var/log/cleanslate-dockerd.log

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }
answers() { docker info >/dev/null 2>&1; }

if answers; then exit 0; fi
[ "$(id -u)" = 0 ] || fail "no Docker Engine answers, and this is not root" \
  "a running Docker Engine, 20.10 or newer" "start it, or run: sudo bash docker/start-engine.sh"
if ! command -v dockerd >/dev/null || ! command -v iptables >/dev/null; then
  command -v apt-get >/dev/null || fail "no dockerd, and no apt-get to install it" \
    "Docker Engine, 20.10 or newer" "install it, then the same command again"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    docker.io iptables >/dev/null
fi
# A killed engine leaves its files of process numbers; another process may have the number by now.
for file in /run/docker.pid /run/docker/containerd/containerd.pid; do
  [ -f "$file" ] || continue
  case "$(cat "/proc/$(cat "$file")/comm" 2>/dev/null)" in
    dockerd | containerd) ;;
    *) rm -f -- "$file" ;;
  esac
done
setsid dockerd >>"$log" 2>&1 </dev/null &
engine=$!
for _ in $(seq 120); do
  if answers; then
    echo "docker: started, $(docker version --format 'Engine {{.Server.Version}}') (log: $log)"
    exit 0
  fi
  kill -0 "$engine" 2>/dev/null || break
  sleep 0.5
done
tail -n 20 "$log" >&2
fail "dockerd does not answer" "a running Docker Engine" "read $log"
