"""From a profile and overrides to settings, and where each value came from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.settings.errors import SettingsError
from pipeline.settings.model import Settings
from pipeline.settings.strict_json import read_plain
from pipeline.settings.strict_yaml import MOST_BYTES, load_yaml

PROFILES = Path(__file__).parent.parent / "profiles"
_MOST_PARENTS = 8
PATH_KEYS = (
    ("run", "root"),
    ("run", "host"),
    ("run", "nccl"),
    ("target", "source", "path"),
    ("prepare", "input"),
    ("prepare", "tokens"),
    ("extract", "staging"),
    ("extract", "server", "python"),
    ("train", "warm_start"),
    ("adopt", "dump"),
)


def plain_absolute(path: Path) -> Path:
    """The same file by an absolute path without `..`, as a container can be shown it.

    There the folders on the way to a mount are not; so what `..` goes up from is resolved, and
    links behind it stay.
    """
    path = path.absolute()
    while ".." in path.parts:
        last = len(path.parts) - path.parts[::-1].index("..")
        path = Path(*path.parts[:last]).resolve().joinpath(*path.parts[last:])
    return path


@dataclass(frozen=True)
class Loaded:
    """Settings, and for each dotted key where its value comes from."""

    settings: Settings
    origins: Mapping[str, str]
    profile: str


def load_settings(profile: str, *, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a profile by name (one that ships) or path, applies `key=value` overrides, checks.

    A profile may name another in `extends`; later values win, mappings merge, lists are replaced,
    and a mapping with another `kind` replaces the old one whole. Paths in a profile are relative
    to its file, paths in an override to the current folder. SettingsError names key, value and
    what is allowed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in reversed(_chain(profile)):
        layer = _read(path)
        layer.pop("extends", None)
        _merge(values, layer, origin=f"profile {path.name}", origins=origins, prefix="")
    for override in overrides:
        layer = _parse_override(override)
        _merge(values, layer, origin="override", origins=origins, prefix="")
    run = values.setdefault("run", {})
    if isinstance(run, dict) and not run.get("name"):
        run["name"] = Path(profile).name.removesuffix(".yaml").removesuffix(".yml")
        origins["run.name"] = "the profile's name"
    if key := _with_zero(values):
        raise SettingsError(
            f"profile {profile}: {key} holds a zero byte",
            wanted="text that a path or a command line can hold",
            next_step="correct the key",
        )
    try:
        # Through JSON: lists become tuples and strings paths, and nothing else is converted.
        settings = Settings.model_validate_json(json.dumps(values, allow_nan=False))
    except ValidationError as error:
        raise _invalid(error, origins, profile) from error
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"profile {profile}: {error}",
            wanted="values that JSON can hold (a date or a set cannot)",
            next_step="quote the value in the profile",
        ) from error
    return Loaded(settings, origins, profile)


def shipped_profiles() -> list[str]:
    """Names of the profiles in the package."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def profile_files(profile: str) -> list[Path]:
    """The files of a profile's chain that do not ship, absolute, nearest first.

    The last one may not exist: what it extends is not known then. SettingsError when one cannot be
    read.
    """
    found: list[Path] = []
    while profile not in shipped_profiles() and len(found) < _MOST_PARENTS:
        found.append((found[-1].parent if found else Path()).absolute() / profile)
        if not _is_file(found[-1]) or (parent := _read(found[-1]).get("extends")) is None:
            break
        profile = str(parent)
    return found


def flatten(section: BaseModel, *, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, meaning) of every leaf, in the order of the model."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from flatten(value, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, info.description or ""


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Origin of a leaf: its own, or that of a list or mapping that holds it; else `default`."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return "default"


def _origin(key: str, origins: Mapping[str, str]) -> str:
    below = [origin for known, origin in origins.items() if known.startswith(f"{key}.")]
    return below[0] if below else origin_of(key, origins)


def _find(profile: str, beside: Path | None = None) -> Path:
    if profile in shipped_profiles():
        return PROFILES / f"{profile}.yaml"
    path = Path(profile)
    if beside is not None and not path.is_absolute():
        path = beside / path
    if _is_file(path):
        return path
    raise SettingsError(
        f"profile {profile!r} does not exist",
        wanted=f"one of {', '.join(shipped_profiles())}, or the path of a .yaml file",
        next_step="make show PROFILE=... with one of these",
    )


def _chain(profile: str) -> list[Path]:
    paths = [_find(profile)]
    while (parent := _read(paths[-1]).get("extends")) is not None:
        path = _find(str(parent), paths[-1].parent)
        if path in paths or len(paths) >= _MOST_PARENTS:
            raise SettingsError(
                f"profile {paths[-1]} extends {parent}, which leads in a circle",
                wanted=f"a chain of at most {_MOST_PARENTS} profiles",
                next_step="remove one of the `extends` lines of these profiles",
            )
        paths.append(path)
    return paths


def _is_file(path: Path) -> bool:
    """SettingsError where that cannot be told: a name too long, a folder that may not be read."""
    try:
        return path.is_file()
    except OSError as error:
        raise SettingsError(
            f"profile {path}: {error.strerror}",
            wanted="the path of a .yaml file that can be read",
            next_step="correct PROFILE=, or `extends` in the profile that names it",
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        value = load_yaml(read_plain(path, most_bytes=MOST_BYTES).decode())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise SettingsError(
            f"profile {path}: {error}",
            wanted="a YAML file with the sections that `make show` prints",
            next_step="correct the file",
        ) from error
    if not isinstance(value, dict):
        raise SettingsError(
            f"profile {path} holds {type(value).__name__}",
            wanted="a mapping of sections",
            next_step="correct the file",
        )
    for *parents, last in PATH_KEYS:
        here: Any = value
        for part in parents:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict) and isinstance(here.get(last), str):
            here[last] = str(path.absolute().parent / here[last])
    return value


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or any(not part for part in key.strip().split(".")):
        raise SettingsError(
            f"override {text!r}",
            wanted="section.key=value, as in train.epochs=3",
            next_step="make show lists every key",
        )
    try:
        parsed = load_yaml(value)
    except yaml.YAMLError as error:
        raise SettingsError(
            f"override {text!r}: {error}",
            wanted="a YAML value after the equals sign",
            next_step="quote the value, as in --set 'run.name=\"x\"'",
        ) from error
    layer: dict[str, Any] = {}
    here = layer
    *parents, last = key.strip().split(".")
    for part in parents:
        here = here.setdefault(part, {})
    here[last] = parsed
    return layer


def _merge(
    base: dict[str, Any],
    layer: Mapping[str, Any],
    *,
    origin: str,
    origins: dict[str, str],
    prefix: str,
) -> None:
    for key, value in layer.items():
        name = f"{prefix}{key}"
        old = base.get(key)
        same_kind = not (
            isinstance(old, dict)
            and isinstance(value, dict)
            and "kind" in value
            and old.get("kind") != value["kind"]
        )
        if isinstance(value, Mapping) and isinstance(old, dict) and same_kind:
            _merge(old, value, origin=origin, origins=origins, prefix=f"{name}.")
        elif isinstance(value, Mapping):
            for stale in [known for known in origins if known.startswith(f"{name}.")]:
                del origins[stale]
            base[key] = {}
            _merge(base[key], value, origin=origin, origins=origins, prefix=f"{name}.")
            if not value:
                origins[name] = origin
        else:
            base[key] = value
            origins[name] = origin


def _with_zero(value: Any) -> str:
    """Dotted key of the first text with a zero byte below a value; empty without one."""
    pairs: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        pairs = enumerate(value)
    for key, inner in pairs:
        below = "" if isinstance(inner, str) else _with_zero(inner)
        if below or (isinstance(inner, str) and "\0" in inner):
            return f"{key}.{below}".rstrip(".")
    return ""


def _invalid(error: ValidationError, origins: Mapping[str, str], profile: str) -> SettingsError:
    details = error.errors(include_url=False)
    lines, wanted = [], []
    for detail in details[:8]:
        key = _dotted(detail)
        value = detail.get("input")
        hidden = detail["type"] in ("missing", "extra_forbidden") or isinstance(value, dict)
        shown = key if hidden else f"{key} is {value!r:.80}"
        lines.append(shown if isinstance(value, dict) else f"{shown} ({_origin(key, origins)})")
        wanted.append(_allowed(detail, key))
    return SettingsError(
        f"profile {profile}: " + "; ".join(lines),
        wanted="; ".join(wanted),
        next_step="correct the key (make show lists all of them with their meaning)",
    )


def _dotted(detail: ErrorDetails) -> str:
    # A union's error carries the chosen kind as a step of its own, which is no key of the profile.
    kinds = {"gguf_wheel", "folder", "random"}
    return ".".join(str(part) for part in detail["loc"] if part not in kinds) or "the settings"


def _allowed(detail: ErrorDetails, key: str) -> str:
    if detail["type"] == "extra_forbidden":
        section = _section(key.split(".")[:-1])
        if section is not None:
            return f"one of: {', '.join(section.model_fields)}"
        return "no such key"
    if detail["type"] == "missing":
        return f"a value for {key}"
    message = detail["msg"]
    return (
        message.removeprefix("Value error, ")[0].lower() + message.removeprefix("Value error, ")[1:]
    )


def _section(parts: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] = Settings
    for part in parts:
        info = section.model_fields.get(part)
        if info is None:
            return None
        found = _model_in(info.annotation)
        if found is None:
            return None
        section = found
    return section


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        models = [found for arg in get_args(annotation) if (found := _model_in(arg))]
        if len(models) == 1:
            return models[0]
    return None
