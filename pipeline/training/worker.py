"""The training process: `python -m pipeline.training.worker REQUEST.json`, alone or under torchrun.

Rank 0 answers in JSON lines on stdout, the last of them `done`; a rank with an error says so there.
Prints of libraries and tracebacks go to stderr.
"""

import os
import signal
import sys
import time
from pathlib import Path

from pipeline.slate.files import read_json
from pipeline.slate.worker import die_with_parent, open_channel, report_error
from pipeline.training.errors import LostPeers, RankError, RequestError
from pipeline.training.loop import train
from pipeline.training.ranks import own_rank
from pipeline.training.request import TrainRequest

_LAUNCHER_FIRST = 10.0  # seconds; it looks ten times a second for ranks that ended


def main() -> None:
    """Trains as REQUEST.json asks. Exit status 0 after `done`, 1 after an error."""
    die_with_parent()
    # A Ctrl-C goes to the whole terminal group; the parent stops its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = open_channel()
    rank = own_rank()
    try:
        if len(sys.argv) != 2:
            raise RequestError(
                f"{len(sys.argv) - 1} arguments",
                wanted="one: the request file",
                next_step="python -m pipeline.training.worker REQUEST.json",
            )
        train(TrainRequest.from_json(read_json(Path(sys.argv[1]))), channel.emit)
    except Exception as error:
        if isinstance(error, LostPeers):
            # Of a peer that ended the launcher knows how it did; it says so and ends this process.
            time.sleep(_LAUNCHER_FIRST)
        own = rank > 0 and not isinstance(error, RankError)  # those name a rank already
        report_error(channel, error, who=f"rank {rank}: " if own else "")
        # Threads of a process group whose peers are gone may never end; this process has no more
        # to say, and everything it wrote is synced.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
