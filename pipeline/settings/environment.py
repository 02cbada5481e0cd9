"""The one place that says what child processes find in their environment.

Children get a short list of names from the parent, and what their stage sets for them; nothing else
is inherited, and what is set goes into the manifest.
"""

import os
from collections.abc import Mapping, Sequence

_INHERITED = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "CUDA_HOME", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE",
)  # fmt: skip


def stage_environment(
    *, threads: int, gpus: Sequence[int], extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What a stage sets for its children: threads, GPUs, no network for model files.

    threads: OpenMP threads of one child. Waiting threads sleep (PASSIVE): on a machine whose cores
    are shared, spinning ones take the time that the working ones need.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **(extra or {}),
    }


def child_environment(stage: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a child: the inherited names that are set here, and the stage's."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}  # noqa: TID251
    return {**inherited, **stage}


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
