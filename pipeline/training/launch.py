"""Several ranks on this host: torchrun in a process that dies with the stage that started it.

python -m pipeline.training.launch RANKS REQUEST.json

The ranks answer in JSON lines on stdout, which is one for all of them. When one ended without a
word, so that torchrun stopped the others, this process says which and how.
"""

import signal
import sys
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from pipeline.slate.child import ending
from pipeline.slate.worker import Channel, die_with_parent, report_error
from pipeline.training.errors import RankError


def main() -> None:
    """Starts RANKS workers that meet on the loopback interface; ends as they end."""
    die_with_parent()
    ranks, request = sys.argv[1:]
    try:
        _launch(ranks, request)
    except ChildFailedError as error:
        report_error(Channel(sys.stdin, sys.stdout), cause_of(error.failures, ranks=int(ranks)))
        sys.exit(1)


def cause_of(failures: Mapping[int, ProcessFailure], *, ranks: int) -> RankError:
    """Of the ranks that did not end well, the one to blame.

    torchrun stops the rest with SIGTERM; one that a signal killed could not say why, another did.
    """
    rank, failure = min(
        failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].exitcode > 0),
    )
    ended, look = ending(failure.exitcode)
    return RankError(
        f"rank {rank} (pid {failure.pid}) {ended}",
        wanted=f"{ranks} ranks alive until the last step",
        next_step=(f"{look}; " if look else "") + "read this stage's log; RESUME=1 continues",
    )


def _launch(ranks: str, request: str) -> None:
    torchrun(
        [
            f"--nproc-per-node={ranks}",
            "--nnodes=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "-m",
            "pipeline.training.worker",
            request,
        ]
    )


if __name__ == "__main__":
    main()
