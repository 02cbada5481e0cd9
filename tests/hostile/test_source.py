"""Nothing that is executable is ever loaded: seen in the code itself, not in one run of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PIPELINE = Path(__file__).parent.parent.parent / "pipeline"
FILES = sorted(PIPELINE.rglob("*.py"))

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTORS = {"eval", "exec", "compile", "__import__"}
# (call, keyword) -> the only thing that may stand there. trust_remote_code: what the setting
# target.remote_code was asked for before (`require_code_allowed`).
KEYWORDS = {
    "trust_remote_code": {"wants_code", "own_code", "remote_code", "request['remote_code']"},
    "shell": {"False"},
    "allow_pickle": {"False"},
    "weights_only": {"True"},
}


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _complaints(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _in_call(node)


def _in_call(call: ast.Call) -> Iterator[str]:
    name = _name(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in EXECUTORS or name in ("os.system", "os.popen", "torch.hub.load", "torch.save"):
        yield name
    if name.startswith("yaml.") and name.endswith(("load", "load_all")):
        safe = name.startswith("yaml.safe_") or given.get("Loader") == "StrictLoader"
        if not safe:
            yield f"{name} with {given}"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name == "np.load" and given.get("allow_pickle", "False") != "False":
        yield name
    for keyword, allowed in KEYWORDS.items():
        if keyword in given and given[keyword] not in allowed:
            yield f"{name}({keyword}={given[keyword]})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PIPELINE).as_posix())
def test_nothing_executable_is_loaded(path: Path) -> None:
    assert list(_complaints(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(f)", "eval(x)", "yaml.load(f)",
     "torch.load(f, weights_only=False)", "run(c, shell=True)", "f(trust_remote_code=True)",
     "yaml.load(f, Loader=yaml.Loader)", "yaml.unsafe_load(f)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert list(_complaints(ast.parse(code))) != []
