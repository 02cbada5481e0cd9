#!/usr/bin/env bash
# Runs a stage, and those it needs, each in a container: `run.sh STAGE options of the stage`.
# What a container gets is decided by pipeline/containers; this asks for that plan, starts, watches
# and clears away. `run.sh release options` ends what a crashed start left. Bash and docker only.
# NETWORK, CA (by default SSL_CERT_FILE) and PIP_CONF are for stages that fetch wheels.
set -Eeuo pipefail
stage="${1:?usage: run.sh STAGE|serve|show|verify|repair|clean-slate|release [options of the stage]}"
shift
options=("$@")
repository="$(cd "$(dirname "$0")/.." && pwd -P)"
here="$(pwd -P)"
facts="$repository/images/images.json"
inside=/run/cleanslate
settle_seconds=30 idle_mib=16

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit "${4:-1}"; }

# The engine must be of this machine, with our user ids: its containers write into our folders.
check_engine() {
  local endpoint security
  command -v docker >/dev/null ||
    fail "no docker command in PATH" "Docker 20.10 or newer" "install it, or RUNTIME=local"
  endpoint="$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>&1)" || true
  [[ $endpoint == unix://* ]] ||
    fail "the docker client talks to ${endpoint:-nothing}" "an engine of this machine: the folders \
of a run are this machine's" "unset DOCKER_HOST, or docker context use default, or RUNTIME=local"
  security="$(docker info --format '{{.SecurityOptions}}' 2>&1)" ||
    fail "no Docker engine answers at $endpoint: ${security##*$'\n'}" "a running engine" \
      "start it (systemctl start docker, or docker/start-engine.sh), or RUNTIME=local"
  user="$(id -u):$(id -g)"
  case "$security" in
  *name=rootless*) user=0:0 ;; # its root is who runs it
  *name=userns*) fail "the engine gives containers other user ids (userns-remap)" \
    "an engine whose containers can write files that belong to $(id -un)" "RUNTIME=local" ;;
  esac
}

# The trainer's image by the id that make images recorded: another checkout may use the same name.
find_trainer() {
  local version
  version="$(<"$repository/VERSION")"
  [ -f "$facts" ] || fail "no $facts" "the images of version $version" "make images"
  trainer="$(tr -d ' \n' <"$facts" | grep -o '"trainer":{[^}]*}' |
    grep -o 'sha256:[0-9a-f]\{64\}' | head -n 1)" ||
    fail "$facts names no trainer" "the record of make images" "make images"
  [ "$(label_of "$trainer" org.opencontainers.image.version)" = "$version" ] ||
    fail "the image ${trainer:0:19} of images.json is gone or of another version" \
      "images of version $version" "make images"
}

label_of() {
  docker image inspect --format "{{index .Config.Labels \"$2\"}}" "$1" 2>/dev/null || true
}

# mount ro|rw|alone SOURCE TARGET: adds to mounts; alone is ro without what links lead to. Where the
# host has no SOURCE, the stage will say so.
mount() {
  local readonly=,readonly link real
  [ "$1" = rw ] && readonly=
  [ -e "$2" ] && [ -z "${mounted[$3]:-}" ] || return 0
  mounted[$3]=yes
  mounts+=(--mount "type=bind,\"source=${2//\"/\"\"}\",\"target=${3//\"/\"\"}\"$readonly")
  [ "$1" = ro ] && [ -d "$2" ] || return 0
  # Links that lead out of the folder: a model in Hugging Face's cache is made of them.
  while IFS= read -r -d '' link; do
    real="$(readlink -f -- "$link")" && [[ $real != "$2"/* ]] && mount ro "$real" "$real"
  done < <(find -- "$2" -maxdepth 2 -type l -print0)
  return 0
}

absolute() { case "$1" in /*) printf %s "$1" ;; *) printf %s "$here/$1" ;; esac; }

lend() { shown+=(--shown "$1") && mount ro "$1" "$1"; }

# Sets plan to the lines of the plan. A file that it needs to see first is shown to it.
ask_plan() {
  local path before='' shown=() lent_files=() mounts=()
  local -A mounted=()
  mount ro "$facts" "$inside/images.json"
  mount ro "$repository/pipeline" "$inside/pipeline"
  [ -n "${CA-${SSL_CERT_FILE:-}}" ] && lent_files+=(--ca "$(readlink -f -- "${CA-$SSL_CERT_FILE}")")
  [ -n "${PIP_CONF:-}" ] && lent_files+=(--pip-conf "$(readlink -f -- "$PIP_CONF")")
  lend "$here/runs" # what is most often asked for
  for path in "${options[@]}"; do
    [ "$before" != --profile ] || [ ! -f "$path" ] || lend "$(absolute "$path")"
    before="$path"
  done
  while :; do
    plan="$(docker run --rm --pull never --init --network none --read-only --cap-drop ALL \
      --security-opt no-new-privileges --user "$user" --workdir "$here" \
      --env PYTHONDONTWRITEBYTECODE=1 --env LANG=C.UTF-8 "${mounts[@]}" \
      --entrypoint /opt/cleanslate/bin/python "$trainer" -P -m pipeline.cli container-plan \
      "$stage" --user "$user" --facts "$facts" --tree "$inside/pipeline" \
      --network "${NETWORK:-}" "${lent_files[@]}" "${shown[@]}" "${options[@]}")" || exit $?
    [[ $plan == need\ * ]] || return 0
    lend "${plan#need }"
  done
}

ours() { docker ps --all --no-trunc --filter "label=cleanslate.run=$run" --format "$1"; }

check_leftover() {
  local left
  left="$(ours '{{.Names}} ({{.ID}}, {{.Status}})')"
  [ -z "$left" ] || fail "a container of this run is there: $left" "none: a run has one at a time" \
    "wait for it if another start watches it; else: make release with the same PROFILE"
}

release() {
  local id name
  while read -r id name; do
    echo "release: stopping $name (${id:0:12})"
    docker stop --time 30 "$id" >/dev/null
    docker rm "$id" >/dev/null 2>&1 || true # its launcher may be there and be quicker
    gone "$name"
    echo "release: $name is gone"
  done < <(ours '{{.ID}} {{.Names}}')
  [ -z "$(ours '{{.ID}}')" ] || fail "left: $(ours '{{.Names}} {{.Status}}')" "no container of \
$run" "docker rm --force, then look at the engine's log"
  echo "release: no container of $run is left"
}

# Waits a little: two who remove it at once both come back before it is gone.
gone() {
  for _ in {1..40}; do
    [ -n "$(docker ps --all --quiet --filter "name=^/$1\$")" ] || return 0
    sleep 0.25
  done
  fail "the container $1 is still there" "none at the end of a stage" \
    "make release with the same PROFILE; then look at the engine's log"
}

# Sends a signal to the stage; it may be about to start.
forward() {
  asked="$1"
  for _ in {1..40}; do
    docker kill --signal "$1" "$name" >/dev/null 2>&1 && return 0
    kill -0 "$client" 2>/dev/null || return 0
    sleep 0.25
  done
}

# Creates, starts and watches one container and clears it away. Comes back only if it went well.
start() {
  local client asked='' state status exit_code killed problem
  docker create "${mounts[@]}" "${arguments[@]}" "$image" "${command[@]}" >/dev/null ||
    fail "the engine makes no container for $inner (its words are above)" "a container" \
      "see docker info; images that are gone come back by make images" 125
  trap 'forward INT' INT
  trap 'forward TERM' TERM HUP
  set -m # a process group of its own: a Ctrl-C reaches the stage once, through forward
  docker start --attach "$name" </dev/null &
  client=$!
  set +m
  while kill -0 "$client" 2>/dev/null; do wait "$client" || true; done
  # The client may have been killed while the container goes on.
  while [ "$(docker inspect --format '{{.State.Running}}' "$name" 2>/dev/null)" = true ]; do
    docker wait "$name" >/dev/null & wait $! || true
  done
  trap - INT TERM HUP
  state="$(docker inspect --format \
    '{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}} {{.State.Error}}' "$name")" ||
    fail "the container of $inner was removed from outside; nothing was sealed" \
      "a container that this start clears away" "the same command with RESUME=1 continues" 143
  read -r status exit_code killed problem <<<"$state"
  docker rm "$name" >/dev/null 2>&1 || true
  gone "$name"
  [ "$status" = exited ] || fail "the container of $inner did not start: $problem" \
    "a container${gpus:+ with GPUs (nvidia-container-toolkit)}" "see the line of docker above" 125
  [ "$killed" = false ] || fail "the kernel killed $inner: out of memory (status $exit_code)" \
    "enough memory" "give it more, then the same command with RESUME=1" "$exit_code"
  check_gpus
  [ "$exit_code" = 0 ] || exit "$exit_code"
  [ -z "$asked" ] || [ "$inner" = serve ] || exit 130 # a stage that was quicker than the stop
}

# GPUs are at 0 MiB again when their container is gone, or the leftover is named.
check_gpus() {
  local used held second
  [ -n "$gpus" ] && command -v nvidia-smi >/dev/null || return 0
  for ((second = 0; second <= settle_seconds; second++)); do
    used="$(timeout 30 nvidia-smi --id="$gpus" --query-gpu=index,memory.used \
      --format=csv,noheader,nounits)" || fail "nvidia-smi ends with status $?" \
      "the memory in use on GPUs $gpus" "look at the driver: dmesg"
    held="$(awk -F', *' -v most=$idle_mib '$2 > most {print "GPU " $1 ": " $2 " MiB"}' <<<"$used")"
    [ -n "$held" ] || { echo "$inner: container gone, GPUs $gpus at 0 MiB"; return 0; }
    sleep 1
  done
  fail "after $inner: ${held//$'\n'/; }" "GPUs $gpus at 0 MiB" \
    "nvidia-smi names the processes that hold them; this project kills none of another's"
}

check_engine
find_trainer
ask_plan
run="${plan%%$'\n'*}" run="${run#run }"
[ "$stage" != release ] || { release; exit; }
[ "$stage" = show ] || check_leftover
name='' inner='' image='' gpus='' way='' source=''
declare -A mounted=()
mounts=() arguments=() command=()
while IFS= read -r line <&3; do
  value="${line#* }"
  case "${line%% *}" in
  container) name="$value" gpus='' mounts=() mounted=() arguments=() command=() ;;
  stage) inner="$value" ;;
  gpus) gpus="$value" ;;
  mount) way="$value" ;;
  source) source="$value" ;;
  target)
    [ "$way" != rw ] || mkdir -p -- "$source" ||
      fail "$source cannot be made" "a folder for runs" "set run.root to another one"
    mount "$way" "$source" "$value" ;;
  argument) arguments+=("$value") ;;
  image) image="$value" ;;
  command) command+=("$value") ;;
  start) start ;;
  esac
done 3<<<"$plan"
