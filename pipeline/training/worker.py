"""The training process: `python -m pipeline.training.worker REQUEST.json`, alone or under torchrun.

Rank 0 answers in JSON lines on stdout, the last of them `done` or `error`; prints of libraries and
the other ranks' tracebacks go to stderr.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

from pipeline.slate.files import read_json
from pipeline.slate.worker import die_with_parent, open_channel, report_error
from pipeline.training.errors import RequestError
from pipeline.training.loop import train
from pipeline.training.ranks import own_rank
from pipeline.training.request import TrainRequest


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
        if rank == 0:
            report_error(channel, error)
        else:
            traceback.print_exc()
        # Threads of a process group whose peers are gone may never end; this process has no more
        # to say, and everything it wrote is synced.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
