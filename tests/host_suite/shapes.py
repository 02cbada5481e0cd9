"""SIMULATED: `nvidia-smi -q` and `lspci` of a host with one GPU, written by us after real ones.

Only the lines that are read. `suite.py` puts them on a PATH as programs.
"""

SMI = """
==============NVSMI LOG==============

Driver Version                                         : 580.95.05
CUDA Version                                           : 13.0

Attached GPUs                                          : 1
GPU 00000000:41:00.0
    Product Name                                       : NVIDIA RTX PRO 6000 Blackwell SIMULATED
    Persistence Mode                                   : Enabled
    MIG Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    PCI
        GPU Link Info
            Link Width
                Max                                    : 16x
                Current                                : 16x
    FB Memory Usage
        Total                                          : 97887 MiB
        Reserved                                       : 636 MiB
        Used                                           : 0 MiB
        Free                                           : 97251 MiB
    BAR1 Memory Usage
        Total                                          : 131072 MiB
    GPU Power Readings
        Current Power Limit                            : 600.00 W
    Processes                                          : None
"""
LSPCI = """\
0000:40:01.1 PCI bridge [0604]: SIMULATED GPP Bridge [1022:14ab] (prog-if 00 [Normal decode])
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

0000:41:00.0 VGA compatible controller [0300]: NVIDIA Corporation SIMULATED [10de:2bb1] (rev a1)
\tCapabilities: [60] Express (v2) Legacy Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <4us
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16 (ok)
\tKernel driver in use: nvidia
"""
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95"
)
JOURNAL = "[    0.000000] Linux version SIMULATED\n"
XID = "[ 9000.000000] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.\n"
