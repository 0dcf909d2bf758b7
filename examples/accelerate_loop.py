"""Our parts in a loop of Hugging Face Accelerate: torchrun --nproc-per-node 2
examples/accelerate_loop.py.

Needs `pip install accelerate`. First compressed gradients with accumulation and bf16, then local
updates.
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations import PerRankState


def task() -> tuple[torch.nn.Module, DataLoader]:
    torch.manual_seed(0)  # all ranks must start from equal parameters
    teacher = torch.nn.Linear(64, 10)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    )
    x = torch.randn(4096, 64)
    return model, DataLoader(TensorDataset(x, teacher(x).argmax(1)), batch_size=32, shuffle=True)


def compressed() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model, loader = task()
    dgc = tw.optim.DGCMomentum(
        model.named_parameters(), lr=0.1, sparsity=(0.75, 0.9375, 0.99), rampup_step=32
    )
    model, optimizer, loader = accelerator.prepare(model, dgc, loader)
    dgc.attach(model)  # new, on what prepare returned: the exchange runs in its backward pass
    PerRankState(dgc).register(
        accelerator
    )  # new: save_state by itself keeps the residuals of rank 0 only

    for epoch in range(4):
        for x, y in loader:
            with accelerator.accumulate(
                model
            ):  # nothing is sent by a backward pass that only accumulates
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"compressed, epoch {epoch + 1}: loss {loss.item():.3f}")
    accelerator.print(f"{dgc.stats()['ratio']:.0f} times fewer bytes than dense")


def local() -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = task()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # or any other
    optimizer, loader = accelerator.prepare(sgd, loader)
    model = accelerator.prepare_model(
        model, evaluation_mode=True
    )  # device and precision, but not wrapped in DDP

    with tw.local_sgd(model, sgd, tw.LocalSGD(k_steps=16, begin_step=10)) as sync:
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
    compressed()
    local()
    Accelerator(cpu=True).end_training()
