"""What exchanges in every step survives a lost machine by a restart, on as many ranks as are left.

On each of two machines:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 examples/restarts.py FOLDER STEPS

FOLDER is one that all of them see. torchrun starts all ranks anew when one is lost; each goes on
from the last whole checkpoint, and rank 0 says what was lost.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits_task import digits

import thinwire as tw

SAVE_EVERY = 20


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = digits()[0].tensors
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    strategy = tw.DistributedStrategy(dgc=tw.DGC(rampup_step=4, min_numel=16))
    engine = strategy.prepare(model, optimizer, torch.nn.CrossEntropyLoss(), timeout=20)
    folder.mkdir(exist_ok=True)
    reached = folder / "reached"  # how far it was, for the message below
    if engine.load(folder, if_any=True) and rank == 0 and reached.exists():
        step, moment = reached.read_text().split()
        lost, away_s = int(step) - engine.step, time.time() - float(moment)
        print(
            f"{size} ranks go on from step {engine.step}: {lost} steps are made again, "
            f"{away_s:.0f} s since the last one",
            flush=True,
        )
    while engine.step < steps:
        torch.manual_seed(1000 * engine.step + rank)  # the batch of a step, of each rank
        chosen = torch.randint(len(images), (32,))
        loss = engine.train_step(images[chosen], labels[chosen])
        if engine.step % SAVE_EVERY == 0:
            engine.save(folder)
        if rank == 0:
            reached.write_text(f"{engine.step} {time.time()}")
    if rank == 0:
        print(f"step {engine.step}: loss {loss:.3f}", flush=True)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
