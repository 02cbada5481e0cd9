"""Faults of NCCL, with codes that stay the same: HOST-NCCL-HANG, -SUM and -FAILED."""

from pipeline.faults import Fault

HANG, SUM, FAILED = "HOST-NCCL-HANG", "HOST-NCCL-SUM", "HOST-NCCL-FAILED"

# Peer-to-peer is advertised and writes to the peer are lost: vllm#51513, nccl#1999, nccl#2079.
SUSPECT = "IOMMU translates, or ACS redirect is on? see HOST-KERNEL-CMDLINE and HOST-KERNEL-ACS"
HINTS = {
    HANG: f"{SUSPECT}: boot with iommu=pt, clear ACS (the playbook does both), try again",
    SUM: f"{SUSPECT}; LL128 also needs hardware that keeps 128 bytes together",
    FAILED: "read the sweep's log beside its output",
}


class NcclError(Fault):
    """A sweep cannot start or has no result, or its file cannot be used."""

    code = "CS-NCCL-SWEEP"


class NcclFileError(NcclError):
    """A file of NCCL's variables cannot be used on this host or by this stage."""

    code = "CS-NCCL-FILE"
