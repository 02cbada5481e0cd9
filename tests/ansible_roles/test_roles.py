"""Laws of ansible/roles that ansible-lint does not know."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = Path(__file__).parents[2] / "ansible" / "roles"
NAMES = sorted(path.name for path in ROLES.iterdir() if path.is_dir())


class _Yaml(yaml.SafeLoader):
    """YAML with Ansible's tags read as plain values."""


_Yaml.add_multi_constructor("!", lambda loader, _suffix, node: loader.construct_scalar(node))


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Yaml)  # noqa: S506  a SafeLoader


def options(role: str) -> dict[str, Any]:
    specs: dict[str, Any] = read(ROLES / role / "meta" / "argument_specs.yml")["argument_specs"]
    found: dict[str, Any] = specs["main"]["options"]
    return found


def files(role: str) -> list[Path]:
    return [path for path in sorted((ROLES / role).rglob("*")) if path.is_file()]


@pytest.mark.parametrize("role", NAMES)
def test_every_variable_has_a_default_and_a_specification(role: str) -> None:
    assert set(options(role)) == set(read(ROLES / role / "defaults" / "main.yml"))


@pytest.mark.parametrize("role", NAMES)
def test_every_option_says_its_type_whether_it_is_required_and_what_it_is(role: str) -> None:
    for name, option in options(role).items():
        assert {"type", "required", "description"} <= set(option), name


@pytest.mark.parametrize("role", NAMES)
def test_a_specification_sets_no_default_because_ansible_would_ignore_it(role: str) -> None:
    assert not [name for name, option in options(role).items() if "default" in option]


@pytest.mark.parametrize("role", NAMES)
def test_a_role_hides_no_error_and_takes_no_latest(role: str) -> None:
    for path in files(role):
        assert not re.search(r"ignore_errors|\blatest\b", path.read_text()), path


@pytest.mark.parametrize("role", NAMES)
def test_phases_have_the_tags_of_their_role(role: str) -> None:
    for task in read(ROLES / role / "tasks" / "main.yml"):
        assert task["tags"][0].startswith(f"{role}_"), task["name"]


def test_daemon_json_has_one_owner() -> None:
    owners = {
        role
        for role in NAMES
        for path in files(role)
        if "/docker/daemon.json" in path.read_text(encoding="utf-8")
    }
    assert owners == {"container_runtime"}
