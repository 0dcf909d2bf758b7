"""LocalSGD, 16 steps."""

import thinwire as tw

INSIDE = "adamw"
SOURCE = "arXiv 1808.07217: plain averaging"


def local(workers: int) -> tw.LocalSGD | None:
    return tw.LocalSGD(16)
