"""Sharded inside a site, thin between sites: torchrun --nproc-per-node 4 examples/sharded.py.

Two sites of two ranks each. FSDP shards the model inside a site, where ranks share the work of
Muon; between the sites each rank sends the changes of its own shards, at one bit, every 8 steps.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import thinwire as tw

SITES = 2


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (SITES, world // SITES), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = tw.optim.Muon(tw.optim.muon_groups(model), lr=6e-3)  # after fully_shard

    strategy = tw.DistributedStrategy(
        localsgd=tw.LocalSGD(k_steps=8, compression=tw.Quantized(value_bits=1))
    )
    engine = strategy.prepare(model, optimizer, torch.nn.functional.cross_entropy, mesh=mesh)

    train_set, (x, y) = digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler, drop_last=True)
    folder = os.environ.get("CHECKPOINTS", "checkpoints")
    engine.load(folder, if_any=True)  # another number of sites or of shards may go on
    for epoch in range(engine.extra or 0, 8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            engine.train_step(inputs, targets)
        engine.flush()  # the last averaging: all sites have one model
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).float().mean())
        engine.save(folder, extra=epoch + 1)
        if dist.get_rank() == 0:
            stats = engine.stats()
            print(
                f"epoch {epoch}: accuracy {accuracy:.3f}, {stats['bytes_between_nodes']:.0f} bytes "
                f"to the other site, {stats['bytes_dense']:.0f} for dense gradients"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
