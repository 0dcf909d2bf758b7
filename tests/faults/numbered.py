"""What `test_numbers` starts: a rank that trains, if its process group comes about."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire as tw
from tests.strategy.training import digest, make_engine, train


def main(report: str, timeout_s: float) -> None:
    """Write the number of ranks and a digest, or nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    engine = make_engine(["dgc"], replace={"dgc": tw.DGC(0, sparsity=(0.5,), min_numel=1)})
    train(engine, ["dgc"], 0, 4)
    Path(report).write_text(f"{dist.get_world_size()} {digest(engine)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
