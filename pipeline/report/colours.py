"""Colours shared by the page and the pictures, legible on white and on near-black.

The series are the eight of Okabe and Ito (2008), told apart with any common colour blindness.
"""

KEPT = "#009E73"
SKIPPED = "#D55E00"
TRAIN = "#56B4E9"
HELD_OUT = "#E69F00"
CONDITIONAL = "#0072B2"
UNCONDITIONAL = "#56B4E9"
INK = "#7a828c"
GRID = "rgba(128,136,146,0.25)"

SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")


def series(index: int) -> str:
    """The colour of series `index` (0-based); repeats after eight."""
    return SERIES[index % len(SERIES)]
