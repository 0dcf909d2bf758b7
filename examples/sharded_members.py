"""Sites that come and go, each with a model in shards.

On the machine where they meet:

    thinwire host --new-token token     # and copy the file to all sites
    thinwire host --bind 10.0.0.1:29400 --token-file token

and at two sites or more, now or later, as a job of its own each:

    torchrun --standalone --nproc-per-node 2 examples/sharded_members.py tcp://10.0.0.1:29400 token

Kill all or one of a site's ranks: the other sites go on.
Needs pip install scikit-learn.
"""

import sys
from itertools import chain, repeat

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw

STEPS = 160


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


def main() -> None:
    if len(sys.argv) < 2:
        print(__doc__)
        return
    address, token_file = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    dist.init_process_group("gloo")  # of this site alone
    shards = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, shards), mesh_dim_names=("replicate", "shard"))
    first = dist.get_rank() == 0

    data, images, labels = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after fully_shard
    config = tw.LocalSGD(k_steps=16, begin_step=0, compression=tw.Quantized(1))
    joined = tw.join(
        address, run="sites", token_file=token_file, start_members=2, timeout=60, mesh=mesh
    )
    with joined as members:
        if first:
            members.on_change(lambda now: print(f"step {now.step}: {now.size} sites", flush=True))
        # each rank of a site has its own samples: together they make a batch of 32
        sampler = tw.ShardedSampler(data, members=members)
        loader = DataLoader(data, 32 // shards, sampler=sampler)
        batches = chain.from_iterable(repeat(loader))  # no end
        with tw.local_sgd(model, optimizer, config, members=members, mesh=mesh) as sync:
            if first:
                print(f"site {members.rank} of {members.size} begins at step {sync.step}")
            while sync.step < STEPS and not members.left:
                x, y = next(batches)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                sync.observe(loss)
                optimizer.step()
    with torch.no_grad():
        right = float((model(images).argmax(1) == labels).float().mean())  # on all ranks of a site
    if first:
        print(f"step {sync.step}: {100 * right:.1f} % of the held-out digits", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
