"""ours: local Muon, 4 steps, 1 bit."""

import thinwire as tw

INSIDE = "muon"
SOURCE = "thinwire"


def local(workers: int) -> tw.LocalSGD | None:
    return tw.LocalSGD(4, compression=tw.Quantized(1))
