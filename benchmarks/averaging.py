"""Processor time and memory of one averaging at one bit, between two ranks of one thread each.

    python -m benchmarks.averaging --millions 8 25 --tensors 160

Local SGD with outer momentum averages after every step. One line for each size: nanoseconds of
processor time a parameter (an averaging with its step, less a step alone; the smallest and the
median of six), and bytes a parameter that the peak of resident memory rises above what was resident
before the averagings. Not part of `make bench`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

import thinwire as tw
from benchmarks.memory import reset_peak, resident_bytes

RUNS = 6


def averaged(rank: int, numel: int, tensors: int, port: int) -> None:
    """Average `RUNS` times and print the figures of rank 0."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    side = int((numel / tensors) ** 0.5)
    model = nn.ParameterList(nn.Parameter(0.02 * torch.randn(side, side)) for _ in range(tensors))
    total = tensors * side * side
    torch.manual_seed(1 + rank)
    for param in model:
        param.grad = torch.randn(side, side)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step_s() -> float:
        begun = time.process_time()
        optimizer.step()
        return time.process_time() - begun

    alone = min(step_s() for _ in range(RUNS))
    config = tw.LocalSGD(
        1, compression=tw.Quantized(1), outer_lr=0.7, outer_momentum=0.9, outer_nesterov=True
    )
    with tw.local_sgd(model, optimizer, config):
        before = resident_bytes("VmRSS")
        reset_peak()
        found = sorted((step_s() - alone) * 1e9 / total for _ in range(RUNS))
    peak = resident_bytes("VmHWM") - before
    if rank == 0:
        print(
            f"{total / 1e6:.1f} M parameters in {tensors} tensors: {found[0]:.1f} ns a parameter "
            f"(median {found[RUNS // 2]:.1f}), peak {peak / total:.1f} bytes a parameter"
        )
    dist.destroy_process_group()


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[8, 25])
    parser.add_argument("--tensors", type=int, default=160)
    options = parser.parse_args()
    for index, millions in enumerate(options.millions):
        port = 29500 + (os.getpid() + index) % 1000
        spawn(averaged, (int(millions * 1e6), options.tensors, port), 2)


if __name__ == "__main__":
    main()
