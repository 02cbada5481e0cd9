"""Is this host ready: facts are gathered, judged and told. Stages refuse on it before they wipe."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.host.checks import examine
from pipeline.host.codes import CODES, codes_of_stage
from pipeline.host.errors import HostNotReady
from pipeline.host.finding import Scope, Verdict
from pipeline.host.gather import HostFacts, gather
from pipeline.host.reader import HostReader, Reader
from pipeline.host.wanted import read_wanted

NOT_READY = 3  # exit status
_HERE = HostReader()


@dataclass(frozen=True)
class Preflight:
    """What was found, and the facts it rests on."""

    verdict: Verdict
    facts: HostFacts

    def as_json(self) -> str:
        """ready, findings, skipped and facts; stable keys."""
        value: dict[str, Any] = {
            "ready": self.verdict.ready,
            "findings": [asdict(finding) for finding in self.verdict.findings],
            "skipped": [
                {"check": skip.check, "reason": skip.reason, "hardware": skip.hardware}
                for skip in self.verdict.skipped
            ],
            "facts": self.facts.as_json(),
        }
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)

    def lines(self) -> Iterator[str]:
        """For people: each finding in three lines, what was not checked, and the sum."""
        for finding in self.verdict.findings:
            yield f"{finding.code}  {finding.subject}: {finding.found}"
            yield f"    wanted: {finding.wanted}"
            yield f"    next:   {finding.next_step}"
        for reason, checks in _by_reason(self.verdict).items():
            yield f"not checked  {', '.join(checks)}: {reason}"
        yield self._sum()

    def _sum(self) -> str:
        findings = len(self.verdict.findings)
        unseen = sum(skip.hardware for skip in self.verdict.skipped)
        if self.verdict.ready:
            return "ready"
        said = [f"{findings} found"] if findings else []
        said += [f"{unseen} hardware checks not made"] if unseen else []
        return f"not ready: {', '.join(said)}"


def scope_of(
    stage: str, *, gpus: tuple[int, ...] | None, container: bool = False, shm_bytes: int | None
) -> Scope:
    """What is checked for a stage that uses `gpus` (None: all); without a name, the whole host."""
    wakes = gpus is None or bool(gpus)
    codes = codes_of_stage(stage, gpus=wakes) if stage else frozenset(CODES)
    return Scope(codes, gpus if stage else None, container, shm_bytes)


def preflight(path: Path, scope: Scope, *, reader: Reader = _HERE) -> Preflight:
    """Checks this host against `ready_host` of `path`. HostError when that cannot be read."""
    wanted = read_wanted(path)
    facts = gather(wanted, reader, scope)
    return Preflight(examine(wanted, facts, scope), facts)


def refuse_unready(path: Path, scope: Scope, *, reader: Reader = _HERE) -> str:
    """HostError with every finding of the scope. Gives a line about what was checked and what not.

    A check that could not be made refuses nothing: a stage's user may not see all that root sees.
    """
    if not scope.codes:
        return "host: nothing of it concerns this stage"
    verdict = preflight(path, replace(scope, own_limits=True), reader=reader).verdict
    if verdict.findings:
        raise HostNotReady(
            "this host is not ready:\n  "
            + "\n  ".join(f"{one.code} {one.subject}: {one.found}" for one in verdict.findings),
            wanted="; ".join(f"{one.subject}: {one.wanted}" for one in verdict.findings),
            next_step="\n  ".join(
                dict.fromkeys(f"{one.code}: {one.next_step}" for one in verdict.findings)
            ),
        )
    skipped = _by_reason(verdict)
    said = "; ".join(f"{', '.join(checks)} ({reason})" for reason, checks in skipped.items())
    return f"host: nothing stands in the way{f'; not checked: {said}' if said else ''}"


def _by_reason(verdict: Verdict) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for skip in verdict.skipped:
        found.setdefault(skip.reason, []).append(skip.check)
    return found
