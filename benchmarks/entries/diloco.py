"""DiLoCo, 30 steps."""

import thinwire as tw

INSIDE = "adamw"
SOURCE = "arXiv 2311.08105: outer Nesterov, rate 0.7, momentum 0.9; 30 steps as in arXiv 2503.09799"


def local(workers: int) -> tw.LocalSGD | None:
    return tw.LocalSGD(30, outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True)
