"""A small real stage for the tests of the protocol; run as a script it is killed and interrupted.

python demo_stage.py ROOT [--resume] [--pieces N] [--pause SECONDS] [--fail] [--input DIR]
"""

import argparse
import time
from pathlib import Path
from typing import Any

from pipeline.slate.door import guard
from pipeline.slate.errors import SlateError
from pipeline.slate.files import write_atomic
from pipeline.slate.stage import Outcome, Workspace, perform


class DemoStage:
    name = "demo"

    def __init__(
        self,
        *,
        pieces: int = 5,
        pause: float = 0.0,
        fail: bool = False,
        check: str = "",
        inputs: dict[str, Path] | None = None,
        gpus: tuple[int, ...] = (),
        room: int = 0,
    ) -> None:
        self.pieces, self.pause, self.fail, self._check = pieces, pause, fail, check
        self.inputs, self.gpus, self.room = inputs or {}, gpus, room
        self.environment: dict[str, str] = {}
        self.decides: dict[str, Any] = {"pieces": pieces}

    def check(self) -> int:
        if self._check:
            raise SlateError(self._check, wanted="no fault", next_step="none")
        return self.room

    def run(self, workspace: Workspace) -> None:
        for number in range(self.pieces):
            path = workspace.output / f"piece-{number}"
            if path.exists() and workspace.resume:
                continue
            time.sleep(self.pause)
            write_atomic(path, bytes([number]) * 1000)
        if self.fail:
            raise RuntimeError

    def verify(self, workspace: Workspace) -> Outcome:
        found = {path.name for path in workspace.output.glob("piece-*")}
        assert found == {f"piece-{number}" for number in range(self.pieces)}
        return Outcome(counts={"pieces": len(found)}, facts={})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--pieces", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    arguments = parser.parse_args()
    stage = DemoStage(pieces=arguments.pieces, pause=arguments.pause, fail=arguments.fail)
    guard(lambda: perform(stage, root=arguments.root, resume=arguments.resume, threads=2))
