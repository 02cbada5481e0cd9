"""Every error a user can meet has a code of its own, and says found, wanted and the next step."""

import ast
import copy
import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import pipeline
from pipeline.faults import Fault, described
from pipeline.slate.door import guard
from pipeline.slate.log import SAY

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "faults.md"
# Of the front itself, which are no classes.
OF_THE_FRONT = {"CS-STOPPED", "CS-USAGE", "CS-BUG"}
# Needs a GPU's driver or the server's packages to be imported; none has a fault of its own.
NOT_IMPORTED = (
    "pipeline.capture.sglang_plugin",
    "pipeline.kernels.cuda",
    "pipeline.capture.sglang_launch",
)


def every_class() -> list[type[Fault]]:
    for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
        if not module.name.startswith(NOT_IMPORTED):
            importlib.import_module(module.name)
    found, waiting = [], [Fault]
    while waiting:
        below = waiting.pop().__subclasses__()
        mine = [kind for kind in below if kind.__module__.startswith("pipeline.")]
        found += mine
        waiting += mine
    return sorted(found, key=lambda kind: kind.__name__)


CLASSES = every_class()
OWN = {kind.__dict__["code"]: kind for kind in CLASSES if "code" in kind.__dict__}


# Bases that only gather the faults of a room; nothing raises them.
BASES = {"DraftError", "TargetError"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_fault_has_a_code(kind: type[Fault]) -> None:
    if kind.__name__ in BASES:
        assert kind.__name__ not in {one.place.split()[1] for one in RAISES}
        return
    assert re.fullmatch(r"CS(-[A-Z]+)+", kind.code)
    fault = kind("found", wanted="wanted", next_step="next")
    assert fault.code == kind.code


def test_no_two_classes_give_themselves_one_code() -> None:
    given = [kind for kind in CLASSES if "code" in kind.__dict__]
    assert len(OWN) == len(given)
    assert not OF_THE_FRONT & set(OWN)


def test_the_table_lists_exactly_the_codes_that_there_are() -> None:
    rows = re.findall(r"^\| `(CS-[A-Z-]+)` \| (.+) \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    assert [code for code, _, _ in rows] == sorted({*OWN, *OF_THE_FRONT})


def test_a_fault_of_another_process_keeps_its_code() -> None:
    fault = Fault("found", wanted="wanted", next_step="next", code="CS-ELSEWHERE")
    again = copy.copy(fault)  # by __reduce__, as it goes to another process
    assert (again.found, again.code) == ("found", "CS-ELSEWHERE")


def _fails() -> None:
    raise KeyError


def test_an_error_without_words_says_its_type_and_its_place() -> None:
    with pytest.raises(KeyError) as caught:
        _fails()
    assert re.fullmatch(r"KeyError: \(no message\) \(test_faults\.py line \d+\)",
                        described(caught.value))  # fmt: skip


class Panic(BaseException):
    """As libraries in Rust raise them."""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Fault("f", wanted="w", next_step="n", code="CS-X"), 1,
         "error: f\n  wanted: w\n  next:   n\n  code:   CS-X\n"),
        (KeyError(), 70, "error: unexpected KeyError: (no message) (test_faults.py line "),
        (AssertionError(), 70, "code:   CS-BUG"),
        (Panic("index out of range"), 70, "unexpected Panic: index out of range"),
        (KeyboardInterrupt(), 130, "code:   CS-STOPPED"),
        (Fault("\x1b[31m\ud800", wanted="w", next_step="n"), 1, "error: \\x1b[31m\\ud800\n"),
    ],
)  # fmt: skip
def test_the_front_says_it_with_its_code(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # where the log of a bug goes
    monkeypatch.setattr(SAY, "handlers", handlers := [])

    def fails() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        guard(fails)
    for handler in handlers:
        handler.close()
    assert ended.value.code == status
    assert said in capsys.readouterr().err
    if status == 70:
        (log,) = (tmp_path / "runs" / "logs").iterdir()
        assert "Traceback" in log.read_text()
        assert "error CS-BUG: unexpected" in log.read_text()


# What a next step may be about: a command, a setting, a file or a place to look.
_ACTION = re.compile(
    r"make [\w{]|RESUME|SET=|ENGINE|RUNTIME|--\w|python -m|pip |profile|override|setting|report it"
    r"|[a-z]+\.[a-z]|\bfile|folder|\blog\b|dmesg|disk|path|wheel|template|target|\bprompts?\b|\bcode\b"
    r"|rank|server|GPUs?|checkpoint|iconv|answer|what holds them|correct|taps|samples|words"
    r"|(read|see|look at|look into) \{\}|traceback|lsof|quantisation|embeddings"
)  # fmt: skip
# Handlers of these may have an error without a single word.
_WORDLESS = {"Exception", "BaseException", "EOFError", "KeyError", "LookupError", "AssertionError",
             "TimeoutError", "MemoryError", "StopIteration"}  # fmt: skip
# A fault that is told again in another room's words.
_PASSED_ON = re.compile(
    r"found|wanted|next_step|facts\.problem|.*\.(found|wanted|next_step)\b.*", re.DOTALL
)


@dataclass(frozen=True)
class Raise:
    place: str
    call: ast.Call
    constants: dict[str, ast.expr]
    caught: frozenset[str]


def _raises() -> Iterator[Raise]:
    names = {kind.__name__ for kind in CLASSES}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        yield from _below(tree, names, constants, frozenset(), path.relative_to(ROOT).as_posix())


def _below(
    node: ast.AST,
    names: set[str],
    constants: dict[str, ast.expr],
    caught: frozenset[str],
    path: str,
) -> Iterator[Raise]:
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        caught = frozenset(
            one.id if isinstance(one, ast.Name) else getattr(one, "attr", "")
            for one in ast.walk(node.type)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        yield Raise(f"{path}:{node.lineno} {node.func.id}", node, constants, caught)
    for child in ast.iter_child_nodes(node):
        yield from _below(child, names, constants, caught, path)


RAISES = list(_raises())


def _text(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """The constant words of an expression; {} for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, constants) for part in node.values)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], constants)
    if isinstance(node, ast.BinOp):
        return _text(node.left, constants) + _text(node.right, constants)
    if isinstance(node, ast.IfExp):
        return _text(node.body, constants) + " / " + _text(node.orelse, constants)
    if isinstance(node, ast.BoolOp):
        return " / ".join(_text(value, constants) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants) if isinstance(node.value, ast.Name) else "{}"
    return "{}"


def _complaints(one: Raise) -> Iterator[str]:
    if not one.call.args:
        yield "no found"
        return
    found = one.call.args[0]
    keywords = {word.arg: word.value for word in one.call.keywords}
    if not {"wanted", "next_step"} <= keywords.keys():
        yield "not its three parts"
        return
    for name, node in (("found", found), ("wanted", keywords["wanted"])):
        passed = _PASSED_ON.fullmatch(ast.unparse(node))
        if not passed and not _text(node, one.constants).strip(" :;{}") and not _computed(node):
            yield f"{name} has no words: {ast.unparse(node)}"
    step = keywords["next_step"]
    if not _PASSED_ON.fullmatch(ast.unparse(step)) and not _ACTION.search(
        _text(step, one.constants)
    ):
        yield f"next step names nothing to do it with: {ast.unparse(step)}"
    shown = ast.unparse(found)
    typed = "type(error)" in shown or "described(error)" in shown
    if re.search(r"\{error\}|str\(error\)", shown) and one.caught & _WORDLESS and not typed:
        yield f"found may be without words: {shown}"


def _computed(node: ast.expr) -> bool:
    """Put together from values that are words themselves: a joined list, a representation."""
    return isinstance(node, ast.Call | ast.BinOp | ast.JoinedStr | ast.IfExp)


@pytest.mark.parametrize("one", RAISES, ids=lambda one: one.place)
def test_a_fault_says_its_three_parts(one: Raise) -> None:
    assert list(_complaints(one)) == []


def test_every_room_was_looked_into() -> None:
    rooms = {one.place.split("/")[1] for one in RAISES}
    assert {"capture", "conversations", "draft", "stages", "store", "target", "training"} <= rooms
    assert len(RAISES) > 250


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("StageError('')", "not its three parts"),
        ("StageError('', wanted='w', next_step='make x')", "found has no words: ''"),
        ("StageError('f', wanted='', next_step='make x')", "wanted has no words: ''"),
        ("StageError('f', wanted='w', next_step='hope')",
         "next step names nothing to do it with: 'hope'"),
        ("StageError(f'x {error}', wanted='w', next_step='make x')",
         "found may be without words: f'x {error}'"),
    ],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(code: str, said: str) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert said in list(_complaints(Raise("here", call, {}, frozenset({"Exception"}))))
