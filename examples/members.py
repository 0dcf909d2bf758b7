"""Members that come and go, without torchrun.

Where they meet: thinwire host --run digits --bind 10.0.0.1:29400, which prints a code.
On every machine, now or later: thinwire join -- python examples/members.py

Or with a token by hand: python examples/members.py tcp://10.0.0.1:29400 token

Kill one, start another one: the rest goes on. Ctrl-C leaves after the running round.
Needs pip install scikit-learn.
"""

import os
import signal
import sys
from itertools import chain, repeat

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw

STEPS = 2000
JOINS = {"THINWIRE_CODE", "THINWIRE_ADDRESS"}  # set by `thinwire join` and `thinwire up`


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    return TensorDataset(images[:1500], labels[:1500]), images[1500:], labels[1500:]


def main() -> None:
    if len(sys.argv) < 2 and not JOINS & os.environ.keys():
        print(__doc__)
        return
    address, token_file = [*sys.argv[1:], None, None][:2]
    data, images, labels = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = tw.LocalSGD(k_steps=16, begin_step=0, compression=tw.Quantized(1))
    with tw.join(address, run="digits", token_file=token_file, timeout=20) as members:
        signal.signal(signal.SIGINT, lambda *_: members.leave())
        members.on_change(lambda now: print(f"step {now.step}: {now.size} members", flush=True))
        sampler = tw.ShardedSampler(data, members=members)
        batches = chain.from_iterable(repeat(DataLoader(data, 32, sampler=sampler)))  # no end
        members.show(total_steps=STEPS)  # on the page of `thinwire host --page`
        with tw.local_sgd(model, optimizer, config, members=members) as sync:
            print(f"member {members.rank} of {members.size} begins at step {sync.step}", flush=True)
            while sync.step < STEPS and not members.left:
                x, y = next(batches)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                sync.observe(loss)
                optimizer.step()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    print(f"step {sync.step}: {100 * right:.1f} % of the held-out digits")


if __name__ == "__main__":
    main()
