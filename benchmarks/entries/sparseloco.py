"""SparseLoCo, 30 steps, 3 % at 2 bits."""

import thinwire as tw

INSIDE = "adamw"
SOURCE = "arXiv 2508.15706: largest entries, error feedback with decay 0.95, outer rate 1"


def local(workers: int) -> tw.LocalSGD | None:
    return tw.LocalSGD(30, compression=tw.Sparse(0.97, 2, 0.95))
