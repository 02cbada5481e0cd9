"""The codes of all faults that a host can have; stable, for people to search and tools to match.

HARDWARE: where such a check cannot be made, nothing stands in for it, and no host is called ready.
"""

from collections.abc import Mapping

CODES: Mapping[str, str] = {
    "HOST-GPU-DRIVER": "there is no NVIDIA driver, or it does not load",
    "HOST-GPU-HUNG": "NVML or nvidia-smi did not answer in time",
    "HOST-GPU-MISMATCH": "loaded driver, library and installed packages are of two versions",
    "HOST-GPU-COUNT": "the bus, NVML and what is wanted do not count the same GPUs",
    "HOST-GPU-MODEL": "a GPU is of another model",
    "HOST-GPU-MEMORY": "a GPU has another amount of memory",
    "HOST-GPU-BAR1": "BAR1 is too small for peer-to-peer",
    "HOST-GPU-HELD": "memory of a GPU is in use",
    "HOST-GPU-MIG": "MIG is on, or will be after the next reset",
    "HOST-GPU-PERSISTENCE": "persistence mode is not as wanted",
    "HOST-GPU-POWER": "the power limit is not as wanted",
    "HOST-GPU-XID": "the kernel reported a GPU error since it was started",
    "HOST-GPU-LINK": "a GPU has fewer PCIe lanes than it could",
    "HOST-KERNEL-CMDLINE": "the kernel was started without a wanted word",
    "HOST-KERNEL-ACS": "ACS redirects peer traffic on a PCIe port",
    "HOST-KERNEL-HEADERS": "headers of a kernel that runs or boots next are missing",
    "HOST-KERNEL-DKMS": "the driver is not built for a kernel that runs or boots next",
    "HOST-DRIVER-BRANCH": "the loaded driver is too old, or not the open kernel modules",
    "HOST-DRIVER-HELD": "a package is absent, of another version, or not held",
    "HOST-TMPFS-MISSING": "no tmpfs is mounted where states pass",
    "HOST-TMPFS-SIZE": "that tmpfs has another live size",
    "HOST-TMPFS-OWNER": "that tmpfs belongs to somebody else",
    "HOST-SHM-SIZE": "/dev/shm is too small, or full",  # noqa: S108
    "HOST-SHM-REMOVEIPC": "logind wipes /dev/shm of a user at logout",
    "HOST-SYSCTL": "a kernel parameter has another value",
    "HOST-CPU-GOVERNOR": "a core has another frequency governor",
    "HOST-LIMITS": "a resource limit of the run user is too low",
    "HOST-DOCKER-ENGINE": "no Docker engine answers",
    "HOST-DOCKER-TOOLKIT": "the engine cannot give GPUs to containers",
    "HOST-DOCKER-DAEMON": "daemon.json differs from what is wanted",
    "HOST-USER": "the run user is absent or different",
    "HOST-USER-DIRECTORY": "a folder of the run user is absent or somebody else's",
    "HOST-NCCL-PROFILE": "the file of NCCL's variables is absent or not as wanted",
}

HARDWARE = frozenset(code for code in CODES if code.startswith("HOST-GPU-")) | {
    "HOST-KERNEL-ACS",
    "HOST-DRIVER-BRANCH",
    "HOST-CPU-GOVERNOR",
}

# What makes this run wrong, slow or stuck, unlike what only the next boot or container meets.
_ON_GPUS = frozenset(code for code in CODES if code.startswith("HOST-GPU-")) | {
    "HOST-KERNEL-CMDLINE",
    "HOST-KERNEL-ACS",
    "HOST-DRIVER-BRANCH",
    "HOST-SYSCTL",
    "HOST-CPU-GOVERNOR",
    "HOST-LIMITS",
    "HOST-SHM-SIZE",
    "HOST-SHM-REMOVEIPC",  # NCCL's segments lie there
}
_THROUGH_TMPFS = frozenset(
    {"HOST-TMPFS-MISSING", "HOST-TMPFS-SIZE", "HOST-TMPFS-OWNER", "HOST-SHM-REMOVEIPC"}
)

# A container shows its own of these; the host's are seen by `make preflight` on the host.
OUT_OF_SIGHT = _THROUGH_TMPFS | {
    "HOST-KERNEL-HEADERS",
    "HOST-KERNEL-DKMS",
    "HOST-DRIVER-HELD",
    "HOST-DOCKER-ENGINE",
    "HOST-DOCKER-TOOLKIT",
    "HOST-DOCKER-DAEMON",
    "HOST-USER",
    "HOST-USER-DIRECTORY",
    "HOST-NCCL-PROFILE",
}


def codes_of_stage(stage: str, *, gpus: bool) -> frozenset[str]:
    """What can stand in the way of one stage."""
    found = _ON_GPUS if gpus else frozenset()
    return found | _THROUGH_TMPFS if stage == "extract" else found
