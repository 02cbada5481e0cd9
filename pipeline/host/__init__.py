"""The host: GPUs, disks, processes, versions. Facts only; what they mean is decided elsewhere.

May import settings and faults.
"""
