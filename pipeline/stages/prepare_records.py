"""What `prepare` reads: the files of its input, and the count of what is left out of them."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.conversations.read import KINDS, kind_of
from pipeline.stages.errors import StageError, TooFew

_DETAIL_CHARACTERS = 400
_EXAMPLES = 5


@dataclass
class Tally:
    """Counts of one pass over the records.

    file: gets a line for each skipped record, or None. strict: the first of them is a StageError.
    examples: one skipped record a reason, for people.
    """

    strict: bool
    file: TextIO | None = None
    read: int = 0
    cut_to_length: int = 0
    cut_answers: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, place: str, reason: str, detail: str) -> None:
        """Counts and lists a record that is left out. A long detail is cut."""
        if len(detail) > _DETAIL_CHARACTERS:
            detail = detail[:_DETAIL_CHARACTERS] + "..."
        self.skipped[reason] += 1
        self.examples.setdefault(reason, f"{place}: {reason}: {detail}")
        if self.file is not None:
            line = {"place": place, "reason": reason, "detail": detail}
            self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if self.strict:
            raise StageError(
                f"{place}: {reason}: {detail}",
                wanted="a usable record (prepare.strict is on)",
                next_step="correct the record, or set prepare.strict=false",
            )

    def refuse_few(self, kept: int, *, share: float) -> None:
        """StageError, with the counts and an example of each reason, when too little is kept.

        share: of the records read, the least to keep (prepare.least_kept_share).
        """
        if kept and kept >= share * self.read:
            return
        examples = "".join(f"\n  {one}" for one in list(self.examples.values())[:_EXAMPLES])
        none = "" if kept else ", no supervised token is left"
        raise TooFew(
            f"{kept} of {self.read} records kept{none}; skipped: {dict(self.skipped)}{examples}",
            wanted=f"at least prepare.least_kept_share, {share:.0%}"
            if kept
            else "at least one conversation with a supervised token",
            next_step="correct the records, or lower the share"
            if kept
            else "correct what the reasons name; the README shows the shapes that are read",
        )


def source_files(source: Path) -> list[Path]:
    """The files of an input, a file or a folder of them, by name.

    StageError or SourceError when it is neither, or anything else is in the folder.
    """
    if not source.exists():
        raise StageError(
            f"prepare.input {source} does not exist",
            wanted="a file or a folder of conversations",
            next_step="correct the path: make prepare INPUT=...",
        )
    files = _files_in(source) if source.is_dir() else [source]
    for path in files:
        kind_of(path)
        if any("\ud800" <= character <= "\udfff" for character in path.name):
            raise StageError(
                f"prepare.input has a file whose name is no UTF-8: {path.name!r}",
                wanted="names that the manifest can hold",
                next_step="rename the file",
            )
    return files


def _files_in(folder: Path) -> list[Path]:
    """The conversation files of a folder. StageError when it holds none, or anything else."""
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in inside if path.name.lower().endswith(KINDS)]
    others = [path.name for path in inside if path not in files]
    if others or not files:
        named = ", ".join(others[:_EXAMPLES]) or "nothing"
        raise StageError(
            f"prepare.input {folder} holds {len(files)} conversation files, and besides: {named}",
            wanted=f"files that end in {', '.join(KINDS)}, and nothing else",
            next_step="take the others out of the folder, or give one of the files",
        )
    return files
