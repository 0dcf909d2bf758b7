"""MuLoCo, 30 steps, 4 bits."""

import thinwire as tw

INSIDE = "muon"
SOURCE = "arXiv 2505.23725: outer Nesterov by workers, error feedback"


def local(workers: int) -> tw.LocalSGD:
    rate, momentum = (0.9, 0.8) if workers < 16 else (1.0, 0.9)
    changes = tw.Quantized(4)
    return tw.LocalSGD(
        30,
        outer_lr=rate,
        outer_momentum=momentum,
        outer_nesterov=True,
        compression=changes,
    )
