"""Members that come and go, with a `StatefulDataLoader`, and a run that is begun anew from a copy.

On the machine where they meet: thinwire host --new-token token, then thinwire
host --bind 10.0.0.1:29400 --token-file token; and on every machine, now or later:

    pip install torchdata
    python examples/members_resume.py tcp://10.0.0.1:29400 token copies

The first member writes a copy after every averaging. Where all have ended, start them again by the
same commands, with the folder of copies on every machine: they go on from its step and its place in
the data, if they are as many as then; else with a new pass over it.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import thinwire as tw

STEPS, K_STEPS, BATCH = 192, 16, 32


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


class Batches:
    """Batches of this member's part of the data, pass after pass; a new one when members change."""

    def __init__(self, data: TensorDataset, members: tw.Members) -> None:
        self._data, self._members = data, members
        self.epoch = 0
        members.on_change(lambda _: self._begin(self.epoch + 1))
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        members, self.epoch = self._members, epoch
        self._sampler = StatefulDistributedSampler(
            self._data, num_replicas=members.size, rank=members.rank, drop_last=True
        )
        self._sampler.set_epoch(epoch)
        self._loader = StatefulDataLoader(self._data, BATCH, sampler=self._sampler, drop_last=True)
        self._batches = iter(self._loader)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            for x, y in self._batches:
                return x, y
            self._begin(self.epoch + 1)
        raise RuntimeError("fewer samples than members times the batch")

    def state_dict(self) -> dict[str, object]:
        """The place in the data, which is the same on all members: each is as far in its part."""
        return {
            "epoch": self.epoch,
            "size": self._members.size,
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        same = state["size"] == self._members.size
        self._begin(int(state["epoch"]) + (not same))
        if same:
            self._loader.load_state_dict(state["loader"])
            self._batches = iter(self._loader)


def main() -> None:
    if len(sys.argv) < 4:
        print(__doc__)
        return
    address, token_file, copies = sys.argv[1:4]
    last = int(sys.argv[4]) if len(sys.argv) > 4 else STEPS
    data, images, labels = digits()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = tw.LocalSGD(K_STEPS, begin_step=0, compression=tw.Quantized(4))
    with tw.join(address, run="digits", token_file=token_file, start_members=2) as members:
        engine = tw.DistributedStrategy(localsgd=config).prepare(
            model, optimizer, torch.nn.functional.cross_entropy, members=members
        )
        sync, batches = engine.sync, Batches(data, members)
        if engine.load(copies, if_any=True):
            batches.load_state_dict(engine.extra)
        place = f"step {sync.step}, pass {batches.epoch}"
        print(f"member {members.rank} of {members.size} begins at {place}", flush=True)
        while sync.step < last and not members.left:
            engine.train_step(*next(batches))
            if sync.synced and members.rank == 0:
                engine.save(copies, extra=batches)
    with torch.no_grad():
        outputs = model(images)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        right = (outputs.argmax(1) == labels).float().mean()
    print(f"step {sync.step}, pass {batches.epoch}: loss {loss:.6f}, {100 * right:.1f} % right")


if __name__ == "__main__":
    main()
