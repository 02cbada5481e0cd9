"""What options of the front set: sources, and the engine that a stage and those before it get."""

import json
from pathlib import Path

from pipeline.containers.plan import REPAIR
from pipeline.faults import Fault
from pipeline.settings.load import plain_absolute
from pipeline.slate.manifest import Manifest
from pipeline.slate.wipe import MANIFEST


def source_overrides(source: str, answers: str, *, samples: str = "", dump: str = "") -> list[str]:
    """What `--input`, `--answers`, `--samples` and `--dump` set."""
    found = []
    if source or samples:
        given, key = ("null", _absolute(samples)) if samples else (_absolute(source), "null")
        found = [f"prepare.input={given}", "prepare.prompts=null", "prepare.answers=file"]
        found.append(f"prepare.tokens={key}")
    if answers:
        found.append(f"prepare.answers={answers}")
    if dump:
        found.append(f"adopt.dump={_absolute(dump)}")
    return found


def _absolute(path: str) -> str:
    return json.dumps(str(plain_absolute(Path(path))), ensure_ascii=False)


def engine_overrides(stage: str, engine: str, *, folder: Path) -> list[str]:
    """What `--engine` sets: the engine of the stage it is given to.

    A sealed stage before it keeps the engine that it was made with; an extraction that is not
    sealed yet gets the same one. A repair has the engine of what it repairs. folder: of the run.
    """
    if stage == REPAIR:
        try:
            sealed = sealed_engine(folder / "extract")
        except Fault:  # the repair will say what is wrong with that seal
            sealed = None
        return [f"extract.engine={sealed}"] if sealed not in (None, "adopted") else []
    keys = {
        "prepare": "prepare.answering.engine",
        "extract": "extract.engine",
        "evaluate": "evaluate.engine",
    }
    order = ("prepare", "extract", "train", "export", "evaluate", "report")
    if stage not in order:
        return []
    found = []
    for name in order[: order.index(stage) + 1]:
        if name not in keys:
            continue
        sealed = None if name == stage else sealed_engine(folder / name)
        if sealed == "adopted":  # by no engine
            continue
        wanted = "loop" if name == "evaluate" and engine == "transformers" else engine
        if sealed is not None or name == stage or name != "prepare":
            found.append(f"{keys[name]}={sealed or wanted}")
    return found


def sealed_engine(output: Path) -> str | None:
    """The engine that a sealed output was made with; None where nothing is sealed."""
    if not (output / MANIFEST).is_file():
        return None
    settings = Manifest.read(output).settings
    # Sealed by a version that had no such choice, or made without writing answers: the default.
    found = settings.get("answering", settings).get("engine", "transformers")
    return str(found)
