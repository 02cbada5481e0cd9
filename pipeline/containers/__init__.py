"""The containers that stages run in: what each gets, decided from the settings alone.

Owns the plan (which stage in which image, with which mounts, limits and network), the record of the
built images, and the proof that an image holds this tree's code. Nothing here talks to an engine or
starts anything: `docker/run.sh` does what the plan says. May import settings and faults.
"""
