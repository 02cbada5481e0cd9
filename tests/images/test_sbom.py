"""The bills of materials: how they are made, and those that `make sbom` wrote of the images."""

import importlib.util
import json
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from testinfra.host import Host

from tests.images.conftest import IMAGES, ROOT, TAGS, VERSION, inspect, locked

SYSTEM = {"ID": "debian", "VERSION_ID": "12"}


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "docker" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distribution(
    folder: Path, name: str, *, license: str = "", local: bool = False
) -> Distribution:
    facts = folder / f"{name}.dist-info"
    facts.mkdir()
    expression = f"License-Expression: {license}\n" if license else ""
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 2.0+cpu\n{expression}"
    )
    if local:
        (facts / "direct_url.json").write_text('{"url": "file:///build", "dir_info": {}}')
    return PathDistribution(facts)


def problem(text: str) -> Any:
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


@pytest.mark.parametrize(
    ("line", "url"),
    [
        (
            "tar\t1.34+dfsg-1.2\tamd64\ttar\t1.34+dfsg-1.2\tinstalled",
            "pkg:deb/debian/tar@1.34%2Bdfsg-1.2?arch=amd64&distro=debian-12",
        ),
        (
            "libgomp1\t12.2.0-14\tamd64\tgcc-12\t12.2.0-14\tinstalled",
            "pkg:deb/debian/libgomp1@12.2.0-14?arch=amd64&distro=debian-12&upstream=gcc-12",
        ),
        (
            "bash\t5.2.15-2+b7\tamd64\tbash\t5.2.15-2\tinstalled",
            "pkg:deb/debian/bash@5.2.15-2%2Bb7?arch=amd64&distro=debian-12&upstream=bash%405.2.15-2",
        ),
        (
            "g++\t4:12.2.0-3\tamd64\tgcc-defaults\t1.203\tinstalled",
            "pkg:deb/debian/g%2B%2B@4:12.2.0-3?arch=amd64&distro=debian-12"
            "&upstream=gcc-defaults%401.203",
        ),
    ],
)
def test_a_debian_package_has_its_version_and_its_source(
    sbom: ModuleType, line: str, url: str
) -> None:
    [component] = sbom.debian(line + "\n", system=SYSTEM)
    assert component["purl"] == url
    assert PackageURL.from_string(url).version == line.split("\t")[1]


def test_a_debian_package_that_is_gone_but_for_its_settings_is_left_out(sbom: ModuleType) -> None:
    line = "nano\t7.2-1\tamd64\tnano\t7.2-1\tconfig-files\n"
    assert sbom.debian(line, system=SYSTEM) == []


def test_a_python_package_has_its_build_and_its_licence(sbom: ModuleType, tmp_path: Path) -> None:
    one = distribution(tmp_path, "Flask_Cors", license="MIT OR Apache-2.0")
    [component] = sbom.python([one])
    assert component == {
        "type": "library",
        "name": "Flask_Cors",
        "version": "2.0+cpu",
        "purl": "pkg:pypi/flask-cors@2.0%2Bcpu",
        "licenses": [{"expression": "MIT OR Apache-2.0"}],
    }


def test_a_package_from_a_folder_is_not_said_to_come_from_an_index(
    sbom: ModuleType, tmp_path: Path
) -> None:
    [component] = sbom.python([distribution(tmp_path, "cleanslate", local=True)])
    assert component["purl"] == "pkg:generic/cleanslate@2.0%2Bcpu"


def test_a_bill_is_valid_and_the_same_for_one_image(sbom: ModuleType, tmp_path: Path) -> None:
    parts = sbom.python([distribution(tmp_path, name, license="MIT") for name in ("b", "a")])
    told = {"name": "cleanslate-trainer", "version": "1", "image": "sha256:ab"}
    created = "2026-11-29T18:40:00.123456789Z"
    text = json.dumps(sbom.bill(parts, **told, created=created))
    assert problem(text) is None
    assert json.loads(text)["specVersion"] == "1.6"  # which the schema of 1.6 does not ask
    assert text == json.dumps(sbom.bill(parts[::-1], **told, created=created))
    assert [one["name"] for one in json.loads(text)["components"]] == ["a", "b"]


def test_the_schema_notices_a_component_without_a_name(sbom: ModuleType) -> None:
    told = {"name": "x", "version": "1", "image": "sha256:ab", "created": "2026-11-29T18:40:00Z"}
    text = json.dumps(sbom.bill([{"type": "library", "purl": "pkg:pypi/x@1"}], **told))
    assert problem(text) is not None


@pytest.mark.images
def test_the_bill_of_an_image_is_valid_and_names_what_is_installed(name: str, host: Host) -> None:
    text = (IMAGES / f"{name}.cdx.json").read_text(encoding="utf-8")
    assert problem(text) is None
    root = json.loads(text)["metadata"]["component"]
    found = inspect(TAGS[name])
    assert found is not None
    assert (root["name"], root["version"]) == (f"cleanslate-{name}", VERSION)
    assert root["properties"] == [{"name": "cleanslate:image-id", "value": found["Id"]}]
    urls = [PackageURL.from_string(one["purl"]) for one in json.loads(text)["components"]]
    debian = {
        f"{one.name}\t{one.version}\t{one.qualifiers['arch']}" for one in urls if one.type == "deb"
    }
    listed = host.check_output(
        "dpkg-query --show --showformat '${Package}\\t${Version}\\t${Architecture}\\n'"
    )
    assert debian == set(listed.splitlines())
    python = {one.name: one.version for one in urls if one.type in ("pypi", "generic")}
    assert python.keys() >= locked(name, python).keys()
