"""Our parts under Lightning's Trainer: torchrun --nproc-per-node 2 examples/lightning_loop.py.

Needs `pip install lightning scikit-learn`. First a strategy with AdamW, beside the same loop
without Lightning; then an attached optimizer with a schedule; then LAMB under local updates.
"""

from collections.abc import Callable
from functools import partial

import lightning
import torch
import torch.distributed as dist
from digits_task import digits, net
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import (
    CompressedExchange,
    LocalAveraging,
    ThinwireCallback,
    UnwrappedDDP,
)
from thinwire.schedules import CosineDecay

MakeOptimizer = Callable[..., torch.optim.Optimizer]
EPOCHS = 4
STRATEGY = tw.DistributedStrategy(
    dgc=tw.DGC(min_numel=4096, rampup_step=48, sparsity=(0.75, 0.9375, 0.99))
)  # low_rank=tw.LowRank(), localsgd=tw.LocalSGD(16) and none at all work too


class Student(lightning.LightningModule):  # an ordinary module: nothing in it is ours
    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.net = net()  # the same on all ranks
        self.make_optimizer = make_optimizer
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.named_parameters())

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss


def task(make_optimizer: MakeOptimizer) -> tuple[Student, TensorDataset]:
    return Student(make_optimizer), digits()[0]


def fit(
    make_optimizer: MakeOptimizer,
    strategy: DDPStrategy,
    callback: lightning.Callback,
    clip: float | None = None,
) -> tuple[lightning.Trainer, list[float]]:
    student, data = task(make_optimizer)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], max_epochs=EPOCHS,
        gradient_clip_val=clip, **quiet,
    )  # fmt: skip
    trainer.fit(student, DataLoader(data, batch_size=32, shuffle=True))
    return trainer, student.losses


def by_hand(make_optimizer: MakeOptimizer) -> list[float]:
    """The strategy without Lightning, which shuffles as DistributedSampler does."""
    student, data = task(make_optimizer)
    sampler: DistributedSampler[int] = DistributedSampler(data)
    optimizer = student.configure_optimizers()
    engine = STRATEGY.prepare(student, optimizer, grad_clip=tw.ClipByGlobalNorm(1.0))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in DataLoader(data, batch_size=32, sampler=sampler):
            engine.minimize(student.training_step(batch, 0))
    return student.losses


def main() -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    callback = ThinwireCallback(STRATEGY)
    trainer, losses = fit(adamw, UnwrappedDDP(), callback, clip=1.0)
    assert losses == by_hand(adamw)
    trainer.print(f"the same {len(losses)} losses without Lightning: {losses[-1]:.3f}")
    trainer.print(f"{callback.engine.stats()['ratio']:.0f} times fewer bytes than dense")

    compressed = partial(
        tw.optim.DGCMomentum, lr=CosineDecay(0.005, 0.05, 96), min_numel=4096,
        sparsity=(0.75, 0.9375, 0.99), rampup_step=48,
    )  # fmt: skip
    trainer, losses = fit(compressed, DDPStrategy(), CompressedExchange())
    ratio = trainer.optimizers[0].stats()["ratio"]
    trainer.print(f"DGC: loss {losses[-1]:.3f}, {ratio:.0f} times fewer bytes than dense")

    averaging = LocalAveraging(tw.LocalSGD(k_steps=16, begin_step=10))
    trainer, losses = fit(partial(tw.optim.Lamb, lr=0.01), UnwrappedDDP(), averaging)
    ratio = averaging.sync.stats()["ratio"]
    trainer.print(f"LocalSGD and LAMB: loss {losses[-1]:.3f}, {ratio:.0f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
