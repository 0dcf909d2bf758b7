"""Our parts in a loop of Hugging Face Accelerate: torchrun --nproc-per-node 2
examples/accelerate_loop.py.

Needs `pip install accelerate scikit-learn`. First a strategy with AdamW, beside the same loop
without Accelerate; then an attached optimizer with accumulation; then local updates.
"""

from itertools import islice

import torch
from accelerate import Accelerator
from digits_task import digits, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.integrations import EngineState, PerRankState

STRATEGY = tw.DistributedStrategy(
    dgc=tw.DGC(rampup_step=32, sparsity=(0.75, 0.9375, 0.99))
)  # low_rank=tw.LowRank(), localsgd=tw.LocalSGD(16) and none at all work too


def task() -> tuple[torch.nn.Module, DataLoader]:
    return net(), DataLoader(digits()[0], batch_size=32, drop_last=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_strategy() -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True)
    model, loader = task()
    optimizer, loader = accelerator.prepare(adamw(model), loader)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # new: not wrapped in DDP
    engine = STRATEGY.prepare(model, optimizer, grad_clip=tw.ClipByGlobalNorm(1.0))  # new
    engine.follow_steps()  # new: optimizer.step() exchanges, clips and updates
    EngineState(engine).register(accelerator)  # new: save_state by itself keeps what rank 0 has

    losses = []
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.mean_loss(loss))
    accelerator.print(f"{engine.stats()['ratio']:.0f} times fewer bytes than dense")
    return losses


def by_hand() -> list[torch.Tensor]:
    """The same without Accelerate, which gives every second batch to each of two ranks."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, loader = task()
    engine = STRATEGY.prepare(model, adamw(model), grad_clip=tw.ClipByGlobalNorm(1.0))
    losses = []
    for x, y in islice(loader, rank, None, world):
        loss = cross_entropy(model(x), y)
        engine.minimize(loss)
        losses.append(engine.mean_loss(loss))
    return losses


def compressed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = task()
    dgc = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.05, sparsity=(0.75, 0.9375, 0.99), rampup_step=32
    )
    model, optimizer, loader = accelerator.prepare(model, dgc, loader)
    dgc.attach(model)  # new, on what prepare returned: the exchange runs in its backward pass
    PerRankState(dgc).register(accelerator)  # new: save_state by itself keeps what rank 0 has

    for epoch in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):  # a backward pass that accumulates sends nothing
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"compressed, epoch {epoch + 1}: loss {loss.item():.3f}")
    accelerator.print(f"{dgc.stats()['ratio']:.0f} times fewer bytes than dense")


def local() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = task()
    bare = adamw(model)  # or any other
    optimizer, loader = accelerator.prepare(bare, loader)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # not wrapped in DDP

    with tw.local_sgd(model, bare, tw.LocalSGD(k_steps=16, begin_step=10)) as sync:
        for epoch in range(2):
            for x, y in loader:
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()  # averages after the step when its turn has come
                optimizer.zero_grad()
            accelerator.print(f"local updates, epoch {epoch + 1}: loss {loss.item():.3f}")
    accelerator.print(
        f"{sync.stats()['ratio']:.0f} times fewer bytes than a dense gradient in every step"
    )


if __name__ == "__main__":
    both = list(zip(by_strategy(), by_hand(), strict=True))
    assert all(torch.equal(theirs, ours) for theirs, ours in both)
    Accelerator(cpu=True).print(
        f"the same {len(both)} losses without Accelerate: {both[-1][1]:.3f}"
    )
    compressed()
    local()
    Accelerator(cpu=True).end_training()
