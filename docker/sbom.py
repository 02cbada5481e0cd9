"""Writes what an image holds as CycloneDX 1.6 to standard output: its Debian and Python packages.

Runs inside the image, on its own interpreter, so that it sees what a stage sees; needs nothing but
the standard library. `docker/sbom.sh` pipes it in. Two calls for one image give the same bytes.
"""

import argparse
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import uuid
from typing import Any
from urllib.parse import quote

_FIELDS = (
    "${Package}\t${Version}\t${Architecture}\t"
    "${source:Package}\t${source:Version}\t${db:Status-Status}\n"
)


def plain(name: str) -> str:
    """A Python package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def escaped(text: str) -> str:
    """Text as a part of a package URL: everything but letters, digits and .-_~: is escaped."""
    return quote(text, safe=":")


def debian(listed: str, *, system: dict[str, str]) -> list[dict[str, Any]]:
    """Components of what dpkg-query lists, a line a package, fields as in `_FIELDS`.

    system: /etc/os-release. Advisories speak of source packages: `upstream` names them.
    """
    found = []
    for line in listed.splitlines():
        name, version, architecture, source, source_version, status = line.split("\t")
        if status != "installed":
            continue
        of = {"arch": architecture, "distro": f"{system['ID']}-{system['VERSION_ID']}"}
        if (source, source_version) != (name, version):
            of["upstream"] = source if source_version == version else f"{source}@{source_version}"
        told = "&".join(f"{key}={escaped(value)}" for key, value in of.items())
        url = f"pkg:deb/{system['ID']}/{escaped(name)}@{escaped(version)}?{told}"
        found.append({"type": "library", "name": name, "version": version, "purl": url})
    return found


def python(distributions: list[importlib.metadata.Distribution]) -> list[dict[str, Any]]:
    """Components of installed Python packages; one installed from a folder comes from no index."""
    found = []
    for one in distributions:
        name, version = one.metadata["Name"], one.version
        kind = "pypi" if one.read_text("direct_url.json") is None else "generic"
        url = f"pkg:{kind}/{escaped(plain(name))}@{escaped(version)}"
        component = {"type": "library", "name": name, "version": version, "purl": url}
        expression = one.metadata.get("License-Expression")
        if expression:
            component["licenses"] = [{"expression": expression}]
        found.append(component)
    return found


def bill(
    components: list[dict[str, Any]], *, name: str, version: str, image: str, created: str
) -> dict[str, Any]:
    """The whole document. image: its id. created: when it was built, as the engine says it."""
    parts = sorted(components, key=lambda one: one["purl"])
    root = {"type": "container", "name": name, "version": version, "bom-ref": "image"}
    root["properties"] = [{"name": "cleanslate:image-id", "value": image}]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, image)}",
        "version": 1,
        "metadata": {"timestamp": created, "component": root},
        "components": [{**one, "bom-ref": one["purl"]} for one in parts],
    }


def main() -> None:
    """Reads the packages of this system and of this interpreter, and prints the document."""
    parser = argparse.ArgumentParser()
    for option in ("name", "version", "image", "created"):
        parser.add_argument(f"--{option}", required=True)
    told = parser.parse_args()
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={_FIELDS}"],
        check=True,
        capture_output=True,
        text=True,
    )
    # One that two folders of sys.path name is imported from the first.
    installed = reversed([*importlib.metadata.distributions()])
    unique = {plain(one.metadata["Name"]): one for one in installed}
    components = debian(listed.stdout, system=platform.freedesktop_os_release())
    document = bill([*components, *python([*unique.values()])], **vars(told))
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
