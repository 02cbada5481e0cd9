"""The stages: one file each, composing the rooms; the order they run in is in `plan.py`.

A stage says what it reads, which settings decide its output, what can fail beforehand, does the
work, and proves it; `pipeline.slate.stage` does the rest. May import every room.
"""
