"""Several ranks on this host: torchrun in a process that dies with the stage that started it.

python -m pipeline.training.launch RANKS REQUEST.json
"""

import sys

from torch.distributed.run import main as torchrun

from pipeline.slate.worker import die_with_parent


def main() -> None:
    """Starts RANKS workers that meet on the loopback interface; ends as they end."""
    die_with_parent()
    ranks, request = sys.argv[1:]
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
