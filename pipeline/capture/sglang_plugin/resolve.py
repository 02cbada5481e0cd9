"""Whether every hook finds its place in the installed SGLang, from its source alone: no GPU needed.

SGLang only logs a hook that it cannot set, so an image's build proves them all first:
`python -m pipeline.capture.sglang_plugin.resolve`, status 1 with a line for each that fails.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.capture.sglang_plugin.configuration import PluginError, check_version
from pipeline.capture.sglang_plugin.hooks import HOOKS, REGISTRY, Capture

# What SGLang puts before the arguments of the hooked method, and what `Capture` names itself.
_BEFORE = {"AROUND": ("self", "original"), "AFTER": ("self", "result")}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def find(dotted: str, *, root: Path) -> ast.AST:
    """The class or function of a dotted name in the package whose folder is root.

    PluginError naming the part that is not there.
    """
    path, parts = root, dotted.split(".")[1:]
    while parts and (path / parts[0]).is_dir():
        path = path / parts.pop(0)
    path = path / f"{parts.pop(0)}.py" if parts else path / "__init__.py"
    if not path.is_file():
        raise PluginError(f"{dotted}: no file {path}")
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in parts:
        node = _member(node, part, dotted)
    return node


def _member(node: ast.AST, name: str, dotted: str) -> ast.AST:
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for child in getattr(node, "body", []):
        if isinstance(child, definitions) and child.name == name:
            return child
        if isinstance(child, ast.Assign) and name in {ast.unparse(one) for one in child.targets}:
            return child
    raise PluginError(f"{dotted}: no {name}")


def relied_on(method: Callable[..., Any], kind: str) -> list[str]:
    """The hooked method's arguments after self that a hook names, in order."""
    parameters = list(inspect.signature(method).parameters.values())
    named = [one.name for one in parameters if one.kind in _POSITIONAL]
    return named[len(_BEFORE[kind]) + 1 :]


def check(target: str, method: Callable[..., Any], kind: str, *, root: Path) -> None:
    """PluginError if the target is absent, or its arguments are not those that the hook names."""
    found = find(target, root=root)
    if not isinstance(found, ast.FunctionDef):
        raise PluginError(f"{target}: {type(found).__name__}; wanted a plain method")
    arguments = [one.arg for one in [*found.args.posonlyargs, *found.args.args]]
    wanted = ["self", *relied_on(method, kind)]
    if arguments[: len(wanted)] != wanted:
        raise PluginError(f"{target}: arguments {arguments}; wanted them to begin with {wanted}")


def problems(*, root: Path) -> list[str]:
    """A line for each hook, and each part of SGLang's hook registry, that is not as wanted."""
    kinds = sorted({kind for *_, kind in HOOKS})
    lines = []
    for name in ("HookRegistry.register", *(f"HookType.{kind}" for kind in kinds)):
        lines += _failure(find, f"{REGISTRY}.{name}", root=root)
    for target, method, kind in HOOKS:
        lines += _failure(check, target, getattr(Capture, method), kind, root=root)
    return lines


def _failure(step: Callable[..., object], *arguments: object, root: Path) -> list[str]:
    try:
        step(*arguments, root=root)
    except PluginError as error:
        return [str(error)]
    return []


def main() -> int:
    """Prints what was found; 0 when every hook resolves."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        found = ["no sglang is installed; wanted one of the supported versions"]
    else:
        check_version(version("sglang"))
        found = problems(root=Path(spec.origin).parent)
    for line in found or [f"all {len(HOOKS)} hooks resolve in SGLang {version('sglang')}"]:
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
