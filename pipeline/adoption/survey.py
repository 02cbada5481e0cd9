"""Every request of a dump judged once, in parallel, and kept in a journal."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.adoption.dump import Request
from pipeline.adoption.judge import FITS, Judge, Verdict
from pipeline.settings.strict_json import parse_json

_FORMAT = 2


@contextmanager
def pool_of(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that does not work off its queue when it is left by an error or a signal."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()


class Journal:
    """One line a decided request, behind a line that says for what; a cut last line is no line.

    A request whose sizes or times changed since is judged again.
    """

    def __init__(self, path: Path, *, about: dict[str, Any]) -> None:
        self._path, self._about = path, {"format": _FORMAT, **about}

    def read(self, requests: Iterable[Request]) -> dict[str, Verdict]:
        """What an earlier try decided of these requests, by name; empty when it was about else."""
        keys = {request.name: request.key for request in requests}
        found = {}
        try:
            with self._path.open(encoding="utf-8") as file:
                if _line(file.readline()) != self._about:
                    return {}
                for text in file:
                    line = _noted(text)
                    if line and keys.get(line["name"]) == line["key"]:
                        found[line["name"]] = Verdict.from_json(line["verdict"])
        except (OSError, UnicodeError, KeyError, TypeError, MemoryError):
            pass  # what cannot be read is judged again
        return found

    @contextmanager
    def writing(self, known: dict[str, Verdict], requests: Sequence[Request]) -> Iterator[Any]:
        """Starts the file anew with what is known, and gives `note(request, verdict)`."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self._about) + "\n")

            def note(request: Request, verdict: Verdict) -> None:
                line = {"name": request.name, "key": request.key, "verdict": verdict.to_json()}
                told = json.dumps(line)
                file.write(f"{zlib.crc32(told.encode()):08x} {told}\n")
                file.flush()

            for request in requests:
                if request.name in known:
                    note(request, known[request.name])
            partial.replace(self._path)
            yield note


def _noted(text: str) -> Any:
    """A line's value; None where its disk lost some of it: another sample's number is one, too."""
    crc, _, told = text.rstrip("\n").partition(" ")
    return _line(told) if crc == f"{zlib.crc32(told.encode()):08x}" else None


def _line(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def survey(
    judge: Judge,
    requests: Sequence[Request],
    journal: Journal,
    *,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, Verdict]:
    """Judges what the journal does not know; gives all verdicts by name, in the requests' order.

    advance: called with 1 for each request judged.
    """
    verdicts = journal.read(requests)
    advance(len(verdicts))
    with journal.writing(verdicts, requests) as note, pool_of(threads) as pool:
        left = [request for request in requests if request.name not in verdicts]
        waiting: dict[Future[Verdict], Request] = {
            pool.submit(judge.judge, request): request for request in left
        }
        for done in as_completed(waiting):
            request = waiting[done]
            verdicts[request.name] = done.result()
            note(request, verdicts[request.name])
            advance(1)
    return {request.name: verdicts[request.name] for request in requests}


def claims(
    requests: Sequence[Request], verdicts: dict[str, Verdict]
) -> tuple[dict[int, list[Request]], dict[str, tuple[str, str]]]:
    """Requests by the sample they fit, and (reason, detail) of those that are left out already.

    Of several that fit one sample and have the same bytes, by size and CRC-32, one stays. Where the
    bytes differ (the sample was run twice, in other batches) each was proven to be the sample's:
    the lowest number is first in the list, the others stand in should it turn out damaged.
    """
    fitting: dict[int, list[Request]] = {}
    left_out: dict[str, tuple[str, str]] = {}
    for request in requests:
        verdict = verdicts[request.name]
        if verdict.outcome != FITS:
            left_out[request.name] = (verdict.outcome, verdict.detail)
            continue
        others = fitting.setdefault(verdict.sample, [])
        mine = _content(verdict)
        twin = next((o for o in others if _content(verdicts[o.name]) == mine), None)
        if twin is not None:
            left_out[request.name] = ("duplicate", f"the same bytes as {twin.name}")
        else:
            others.append(request)
    return fitting, left_out


def _content(verdict: Verdict) -> list[tuple[int, int]]:
    return [(piece.record_bytes, piece.crc) for piece in verdict.pieces]
