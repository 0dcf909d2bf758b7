"""ours: local Muon, 16 steps, 10 % at 1 bit."""

import thinwire as tw

INSIDE = "muon"
SOURCE = "thinwire"


def local(workers: int) -> tw.LocalSGD | None:
    return tw.LocalSGD(16, compression=tw.Sparse(0.9, 1, 0.9, "all"))
