"""Whether the containers of a stage can take run.nccl, asked before the first of them starts."""

from collections.abc import Collection
from pathlib import Path

from pipeline.containers.plan import REPAIR, SERVE, STAGES, Request, nccl_gpus, stages_to_run
from pipeline.nccl.cases import Use
from pipeline.nccl.profile import environment_for
from pipeline.settings.model import Settings


def unseen_nccl(request: Request, settings: Settings, shown: Collection[Path]) -> Path | None:
    """The file run.nccl where a stage will read it and it was not shown yet.

    NcclError where it was, and one of the stages could not take it.
    """
    file = settings.run.nccl
    if file is None or request.stage not in (*STAGES, SERVE, REPAIR):
        return None
    for stage in stages_to_run(request, settings):
        gpus = nccl_gpus(stage, settings)
        if not gpus or (request.resume and stage in request.sealed):
            continue
        if file.absolute() not in shown:
            return file.absolute()
        use: Use = "training" if stage == "train" else "extraction"
        environment_for(file, use, explicit={}, gpus=gpus)
    return None
