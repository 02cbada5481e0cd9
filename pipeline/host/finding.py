"""What checks say: a finding for each fault, and what could not be checked."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.host.codes import CODES, HARDWARE, OUT_OF_SIGHT


@dataclass(frozen=True)
class Finding:
    """One fault. code: of codes.CODES; subject: what it is about, as `GPU 3` or a path."""

    code: str
    found: str
    wanted: str
    next_step: str
    subject: str

    def __str__(self) -> str:
        return f"{self.code} {self.subject}: {self.found}; wanted {self.wanted}"


@dataclass(frozen=True)
class Skip:
    """A check that could not be made. check: its code."""

    check: str
    reason: str

    @property
    def hardware(self) -> bool:
        """Whether no host can be called ready without it."""
        return self.check in HARDWARE


@dataclass(frozen=True)
class Verdict:
    """ready: nothing was found and every hardware check that is wanted was made."""

    findings: tuple[Finding, ...] = ()
    skipped: tuple[Skip, ...] = ()

    @property
    def ready(self) -> bool:
        """Not the same as no findings: what was not looked at is not known to be right."""
        return not self.findings and not any(skip.hardware for skip in self.skipped)


@dataclass(frozen=True)
class Scope:
    """What is checked and from where.

    gpus: those of a stage, as NVML numbers them here; None: all. container: facts are read in a
    container of a stage, which has a /dev/shm and limits of its own. shm_bytes: what /dev/shm must
    hold; None: not wanted. own_limits: those of this process count, which is the stage's.
    """

    codes: frozenset[str] = frozenset(CODES)
    gpus: tuple[int, ...] | None = None
    container: bool = False
    shm_bytes: int | None = None
    own_limits: bool = False

    def wants(self, code: str) -> bool:
        """Whether the check can be made from here at all, and is asked for."""
        return code in self.codes and not (self.container and code in OUT_OF_SIGHT)


@dataclass
class Notes:
    """Collects findings and skips of one scope; what the scope leaves out is dropped."""

    scope: Scope
    findings: list[Finding] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def fault(self, code: str, subject: str, found: str, *, wanted: str, next_step: str) -> None:
        """Adds a finding."""
        if self.scope.wants(code):
            self.findings.append(Finding(code, found, wanted, next_step, subject))

    def skip(self, codes: Iterable[str] | str, reason: str) -> None:
        """Adds checks that cannot be made."""
        for code in (codes,) if isinstance(codes, str) else codes:
            if self.scope.wants(code):
                self.skipped.append(Skip(code, reason))

    @property
    def verdict(self) -> Verdict:
        """What was found, GPUs of one fault together."""
        return Verdict(tuple(_together(self.findings)), tuple(dict.fromkeys(self.skipped)))


def _together(findings: Iterable[Finding]) -> Iterable[Finding]:
    """One finding where only the subject differs: eight GPUs with MIG on are one line."""
    subjects: dict[tuple[str, str, str, str], list[str]] = {}
    for one in findings:
        key = (one.code, one.found, one.wanted, one.next_step)
        subjects.setdefault(key, []).append(one.subject)
    for (code, found, wanted, next_step), names in subjects.items():
        yield Finding(code, found, wanted, next_step, _joined(names))


def _joined(names: list[str]) -> str:
    numbers = [name.removeprefix("GPU ") for name in names]
    if len(names) > 1 and all(name.startswith("GPU ") for name in names):
        return f"GPUs {', '.join(numbers)}"
    return ", ".join(names)
