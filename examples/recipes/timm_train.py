"""In the manner of timm's train.py, with a small net and scanned digits: torchrun --nproc-per-node
2 examples/recipes/timm_train.py.
"""

import argparse
import logging

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

_logger = logging.getLogger("train")
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--clip-grad", type=float, default=1.0)
parser.add_argument("--log-interval", type=int, default=8)


def create_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def create_datasets() -> tuple[Dataset, Dataset]:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1408], y[:1408]), TensorDataset(x[1408:], y[1408:])


def main() -> None:
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    model = create_model()
    dataset_train, dataset_eval = create_datasets()
    sampler = DistributedSampler(dataset_train)
    loader_train = DataLoader(dataset_train, args.batch_size, sampler=sampler)
    loader_eval = DataLoader(dataset_eval, args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    model = NativeDDP(model)
    total = args.epochs * len(loader_train)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    train_loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, scheduler, args)
    eval_loss = validate(model, loader_eval)
    if rank == 0:
        print(f"val loss {eval_loss:.4f}")
    dist.destroy_process_group()


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, lr_scheduler, args):
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        output = model(input)
        loss = loss_fn(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        if batch_idx % args.log_interval == 0 and dist.get_rank() == 0:
            _logger.info(f"Train: {epoch} [{batch_idx}/{len(loader)}] Loss: {loss.item():.3f}")


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses = [nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in loader]
    return float(sum(losses)) / len(loader.dataset)


if __name__ == "__main__":
    main()
