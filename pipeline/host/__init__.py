"""The host: GPUs, disks, processes, versions, and what keeps it from being a ready one.

Facts are read within time limits and parsed by pure functions; checks compare them with what a
ready host is and decide nothing else. May import settings and faults.
"""
