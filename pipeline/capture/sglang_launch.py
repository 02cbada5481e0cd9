"""Runs SGLang's server inside SGLang's own interpreter: `python -m pipeline.capture.sglang_launch`.

The process dies with its parent, and gets the API key on stdin, so that no list of processes shows
it. Needs nothing but the standard library and SGLang. Started by `sglang_server.SglangServer`.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and becomes `sglang.launch_server`."""
    parent = int(sys.argv.pop(1))
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the line above
        raise SystemExit("the process that started this server is gone")
    key = sys.stdin.readline().strip()
    sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
