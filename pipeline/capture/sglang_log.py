"""Reading an SGLang server's log: what it is doing, and why it died."""

import re

_TRACEBACK = "Traceback (most recent call last):"
_TAIL_LINES = 15
_CAUSE_LINES = 40
# Exceptions by which one process only notices that another one is gone.
_CONSEQUENCE = re.compile(
    r"^(EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|"
    r"SystemExit|requests\.exceptions\.\w+|urllib3\.exceptions\.\w+|torch\.distributed\.DistNetworkError|asyncio\.exceptions\.CancelledError)\b"
)
_HIT = re.compile(r"hit an exception: ?Traceback")
_NOISE = re.compile(r"Warning\b|^warnings\.warn\(|\b(GET|POST) /")
_STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d[ T][\d:.,]+[^\]]*\]\s*")
_ERROR_LINE = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Fault)\b|^\w+(\.\w+)+: ")


def last_line(text: str) -> str:
    """Last line that says something, without its time stamp, shortened for a screen."""
    for line in reversed(text.replace("\r", "\n").splitlines()):
        said = _STAMP.sub("", line).strip()
        if said and not line.startswith((" ", "\t")) and not _NOISE.search(said):
            return said[:160]
    return "(nothing written yet)"


def tracebacks(text: str) -> list[list[str]]:
    """Every traceback of a log, in order, each as its lines up to the exception's message."""
    found: list[list[str]] = []
    open_one: list[str] | None = None
    for line in text.splitlines():
        if _TRACEBACK in line:
            open_one = [_TRACEBACK]
            found.append(open_one)
        elif open_one is not None:
            open_one.append(line)
            if line and not line.startswith((" ", "\t")) and _is_end(line):
                open_one = None
    return found


def _is_end(line: str) -> bool:
    return _STAMP.match(line) is not None or _ERROR_LINE.match(line) is not None


def root_cause(text: str) -> list[str]:
    """The lines that say why a server died.

    The first traceback with which a rank ended, else the last one of the log; in both cases not
    one by which a process merely notices that another is gone. Without any, the last lines.
    """
    ended = text[match.start() :] if (match := _HIT.search(text)) else text
    own = [one for one in tracebacks(ended) if not _CONSEQUENCE.match(one[-1].strip())]
    if own:
        best = own[0] if match else own[-1]
        return best if len(best) <= _CAUSE_LINES else [best[0], "  ...", *best[-_CAUSE_LINES:]]
    return [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]


def lines_about(text: str, word: str) -> list[str]:
    """The last lines that hold a word, without their time stamps, for an error message."""
    found = [_STAMP.sub("", line).strip() for line in text.splitlines() if word in line]
    return found[-_TAIL_LINES:]


def is_port_taken(text: str) -> bool:
    """Whether the server ended because something else listens on its port."""
    return re.search(r"address already in use|Errno 98", text, re.IGNORECASE) is not None
