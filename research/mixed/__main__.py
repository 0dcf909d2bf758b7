"""Do two machines of other arithmetic hold the same anchors? One JSON line per pair and method.

    python -m research.mixed                       # the instruction sets of this machine
    python -m research.mixed --pairs "default,two threads" --rounds 8
    python -m research.mixed --other "qemu-aarch64 python3"   # and another interpreter

Two processes make local updates from gradients of their own and average after each step. After
every quarter of the rounds each says a digest of its anchors and outer momentum: are all equal?
"""

import argparse
import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw

ROUNDS = 200
_OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "dense": {},
    "dense, outer Nesterov": _OUTER,
    "dense, bfloat16 parameters": {"dtype": torch.bfloat16, **_OUTER},
    "dense, fragments in flight": {"k_steps": 6, "fragments": 2, "delay": 1},
    "1 bit": {"compression": tw.Quantized(1), **_OUTER},
    "1 bit, split": {"compression": tw.Quantized(1, exchange="split")},
    "2 bits": {"compression": tw.Quantized(2)},
    "4 bits": {"compression": tw.Quantized(4), **_OUTER},
    "8 bits": {"compression": tw.Quantized(8)},
    "16 bits": {"compression": tw.Quantized(16)},
    "sparse": {"compression": tw.Sparse(0.99), **_OUTER},
    "sparse, 8 bits": {"compression": tw.Sparse(0.99, value_bits=8)},
    "low rank": {"compression": tw.LowRank(4)},
}
MACHINES: Mapping[str, Mapping[str, str]] = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "numba for any CPU": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "torch's kernels": {"THINWIRE_KERNELS": "reference"},
}
PAIRS = (
    "default,avx2",
    "default,avx512",
    "avx2,avx512",
    "avx512,two threads",
    "default,numba for any CPU",
    "avx512,torch's kernels",
)


def digest_of(state: Mapping[str, Any]) -> str:
    """Return a digest of what all ranks share."""
    found = hashlib.blake2b(digest_size=8)
    for kind in ("anchors", "outer_momentum"):
        for tensor in state[kind].values():
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def train(rank: int, rounds: int, method: Mapping[str, Any]) -> list[str]:
    """Make local updates, and return the digests of the anchors."""
    given = dict(method)
    torch.manual_seed(0)
    layers = torch.nn.Linear(190, 90), torch.nn.Linear(90, 7)
    model = torch.nn.Sequential(*layers).to(given.pop("dtype", torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own, found = torch.Generator().manual_seed(rank), []
    config = tw.LocalSGD(**{"k_steps": 1, **given})
    with tw.local_sgd(model, optimizer, config, digest_every=0) as sync:
        for step in range(1, rounds * config.k_steps + 1):
            for param in model.parameters():
                # of many magnitudes, which changes what is rounded
                noise = torch.randn(param.shape, generator=own)
                size = torch.randint(-24, 3, param.shape, generator=own)
                param.grad = torch.ldexp(noise, size).to(param.dtype)
            optimizer.step()
            if step % (max(rounds // 4, 1) * config.k_steps) == 0:
                found.append(digest_of(sync.state_dict()))
    return found


def work(rank: int, port: int, rounds: int, methods: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what this process found with each method."""
    place: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}"}
    place |= {"rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(minutes=5), **place)
    for name in methods:
        try:
            yield {"digests": train(rank, rounds, METHODS[name])}
        except tw.errors.Mismatch as refusal:
            yield {"refused": str(refusal)}
    dist.destroy_process_group()


def answers_of(
    commands: Sequence[Sequence[str]], machines: Sequence[Mapping[str, str]], rounds: int
) -> Iterator[tuple[dict[str, Any], ...]]:
    """Run a pair of processes, and yield what both found, by method."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank, (command, machine) in enumerate(zip(commands, machines, strict=True)):
        env = {**os.environ, "OMP_NUM_THREADS": "1", **machine}
        task = [*command, "-m", "research.mixed", "--rank", str(rank), "--port", str(port)]
        task += ["--rounds", str(rounds)]
        processes.append(subprocess.Popen(task, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    yield from zip(
        *(
            [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            for out in outputs
        ),
        strict=True,
    )


def main() -> None:
    """Print one line per pair and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pairs", nargs="+", default=PAIRS)
    parser.add_argument("--other", help="command of another interpreter, for one more pair")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        for found in work(given.rank, given.port, given.rounds, list(METHODS)):
            print(json.dumps(found), flush=True)
        return
    here = [sys.executable]
    pairs = [(*pair.split(","), here, here) for pair in given.pairs]
    if given.other:
        pairs = [("avx2", given.other, here, shlex.split(given.other))]
    for one, other, *commands in pairs:
        machines = [MACHINES.get(name, {}) for name in (one, other)]
        both = answers_of(commands, machines, given.rounds)
        for method, (first, second) in zip(METHODS, both, strict=True):
            line = {"pair": [one, other], "method": method, "rounds": given.rounds}
            print(json.dumps({**line, "equal": first == second, **first}), flush=True)


if __name__ == "__main__":
    main()
