"""One rank of one attempt: `python -m pipeline.nccl.worker [--inject WHAT]`, request on stdin.

NCCL reads its variables once, when it starts: every attempt has processes of its own. Answers are
JSON lines: `imported`, `joined`, a `case` with this rank's seconds as soon as it is measured,
`wrong` for a number that is not exact, `finished`. Then it waits for its input to close, so that no
rank goes while another still has a message under way.
"""

import argparse
import os
import signal
import sys
from typing import Any

from pipeline.nccl.cases import Case
from pipeline.slate.worker import Channel, die_with_parent, open_channel, report_error

INJECTIONS = ("hang", "wrong", "crash", "kill")


def main() -> None:
    """Measures all cases of the request. Exit status 0 when its input closes, 1 after an error."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--inject", choices=INJECTIONS, help="what the last rank does, for tests")
    injected: str | None = parser.parse_args().inject
    channel = open_channel()
    try:
        requests = channel.receive()
        request = next(requests)
        if os.getppid() != request["parent"]:  # it died before this process could ask to die too
            os._exit(1)
        last = request["rank"] == request["world"] - 1
        _answer(request, channel, injected=injected if last else None)
        for _ in requests:
            pass
    except Exception as error:
        report_error(channel, error)
        sys.stderr.flush()
        os._exit(1)  # threads of a group whose peers are gone may never end
    sys.stderr.flush()
    os._exit(0)


def _answer(request: dict[str, Any], channel: Channel, *, injected: str | None) -> None:
    # Seconds that are no part of what may hang: the attempt's clock starts after them.
    from pipeline.nccl import measure

    channel.emit({"event": "imported"})
    rank, world = request["rank"], request["world"]
    device = measure.device_of(request["backend"], rank)
    measure.join(request, device)
    channel.emit({"event": "joined", **measure.about(device)})
    for value in request["cases"]:
        case = Case(**value)
        seconds, wrong = measure.measure(
            case, rank=rank, world=world, device=device, injected=injected
        )
        if wrong is not None:
            channel.emit({"event": "wrong", "case": case.key, "what": wrong})
            return
        channel.emit({"event": "case", "case": case.key, "seconds": seconds})
    channel.emit({"event": "finished"})


if __name__ == "__main__":
    main()
