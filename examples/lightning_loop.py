"""Our parts under Lightning's Trainer: torchrun --nproc-per-node 2 examples/lightning_loop.py.

Needs `pip install lightning`. First compressed gradients with a schedule, then LAMB under local
updates.
"""

from collections.abc import Callable
from functools import partial

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import CompressedExchange, LocalAveraging, UnwrappedDDP
from thinwire.schedules import CosineDecay

MakeOptimizer = Callable[..., torch.optim.Optimizer]


class Student(lightning.LightningModule):  # an ordinary module: nothing in it is ours
    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
        )
        self.make_optimizer = make_optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.named_parameters())

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.loss = cross_entropy(self.net(batch[0]), batch[1])
        return self.loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch + 1}: loss {self.loss.item():.3f}")


def fit(
    make_optimizer: MakeOptimizer, strategy: DDPStrategy, callback: lightning.Callback
) -> lightning.Trainer:
    torch.manual_seed(0)  # all ranks must start from equal parameters
    student = Student(make_optimizer)
    x = torch.randn(4096, 64)
    loader = DataLoader(
        TensorDataset(x, torch.nn.Linear(64, 10)(x).argmax(1)), batch_size=32, shuffle=True
    )
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], max_epochs=4, **quiet
    )
    trainer.fit(student, loader)
    return trainer


def main() -> None:
    compressed = partial(
        tw.optim.DGCMomentum,
        lr=CosineDecay(0.01, 0.1, 256),
        min_numel=4096,
        sparsity=(0.75, 0.9375, 0.99),
        rampup_step=48,
    )
    trainer = fit(compressed, DDPStrategy(), CompressedExchange())
    trainer.print(f"DGC: {trainer.optimizers[0].stats()['ratio']:.0f} times fewer bytes than dense")

    averaging = LocalAveraging(tw.LocalSGD(k_steps=16, begin_step=10))
    trainer = fit(partial(tw.optim.Lamb, lr=0.01), UnwrappedDDP(), averaging)
    trainer.print(
        f"LocalSGD with LAMB: {averaging.sync.stats()['ratio']:.0f} times fewer bytes than dense"
    )


if __name__ == "__main__":
    main()
