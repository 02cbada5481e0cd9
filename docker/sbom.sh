#!/usr/bin/env bash
# Writes images/<image>.cdx.json (CycloneDX) for each image of this version that is built.
# Needs docker alone: docker/sbom.py runs on the image's own interpreter.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
version="$(cat VERSION)"

fail() { printf 'error: %s\n  wanted: %s\n  next:   %s\n' "$1" "$2" "$3" >&2; exit 1; }

[ -f images/.cleanslate ] || fail "no images/ of ours here" "what make images records" "make images"
write() {
  local tag="$1" name="$2" file="images/$2.cdx.json" id created
  id="$(docker image inspect --format '{{.Id}}' -- "$tag")"
  created="$(docker image inspect --format '{{.Created}}' -- "$tag")"
  docker run --rm --interactive --network none --read-only --cap-drop ALL \
    --security-opt no-new-privileges --entrypoint /opt/cleanslate/bin/python "$id" -I - \
    --name "cleanslate-$name" --version "$version" --image "$id" --created "$created" \
    <docker/sbom.py >"$file.partial"
  mv -- "$file.partial" "$file"
  echo "sbom: $file, $(grep -c '"purl"' "$file") packages of $tag"
}
written=
for pair in trainer: extractor: extractor:-cpu; do
  name="${pair%%:*}" suffix="${pair##*:}"
  tag="cleanslate-$name:$version$suffix"
  docker image inspect -- "$tag" >/dev/null 2>&1 || continue
  write "$tag" "$name$suffix"
  written="$written $name"
done
case "$written" in
  *trainer*extractor*) ;;
  *) fail "of the images of version $version there are:${written:- none}" \
    "trainer and extractor" "make images" ;;
esac
