"""Rank of `benchmarks.use`: local updates whose steps sleep; rank 0 prints where the time went.

Started by `thinwire run` with the settings as JSON.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.comm import Group

COMPRESSIONS: dict[str, Any] = {
    "plain": None,
    "sparse 3 %": tw.Sparse(0.97),
    "4 bits": tw.Quantized(4),
    "1 bit": tw.Quantized(1),
}
_WIDTH, _LAYERS = 500, 4


def watch() -> dict[str, float]:
    """Sum the seconds that this rank waits, by what it waits for."""
    found: dict[str, float] = defaultdict(float)
    plain = Group._wait_for_all

    def waiting(
        self: Group, works: Sequence[dist.Work], action: str, *given: Any, **how: Any
    ) -> None:
        begin_s = time.perf_counter()
        plain(self, works, action, *given, **how)
        kind = "agreements" if "agreeing" in action else "messages"
        found[kind] += time.perf_counter() - begin_s

    Group._wait_for_all = waiting  # type: ignore[method-assign]
    return found


def beyond_an_update(steps: Sequence[float]) -> float:
    """Return the seconds of all steps beyond that of an update: few steps have work besides."""
    update_s = statistics.quantiles(steps, n=4)[0]
    return sum(max(0.0, taken_s - update_s) for taken_s in steps)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    config = tw.LocalSGD(
        given["distance"] * given["fragments"],
        begin_step=1,
        compression=COMPRESSIONS[given["method"]],
        fragments=given["fragments"],
        delay=given["delay"],
    )
    waited = watch()
    with tw.local_sgd(model, optimizer, config) as sync:
        worked: list[float] = []
        walls: list[float] = []
        averagings = 0.0
        for step in range(given["steps"] + 2 * given["distance"]):
            if step == 2 * given["distance"]:  # loops are compiled, links are warm
                averagings = sync.stats()["averagings"]
                worked.clear()
                walls.clear()
                waited.clear()
            begun_s = time.perf_counter()
            x = torch.randn(4, _WIDTH, generator=generator)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            time.sleep(max(0.0, begun_s + given["step_s"] - time.perf_counter()))
            stepping_s, working_s = time.perf_counter(), time.thread_time()
            optimizer.step()
            worked.append(time.thread_time() - working_s)
            walls.append(time.perf_counter() - stepping_s)
        rounds = sync.stats()["averagings"] - averagings
        parts = {**waited, "work": beyond_an_update(worked)}
        exposed_s = sum(parts.values())
        if dist.get_rank() == 0:
            row = {
                **given,
                "parameters": sum(p.numel() for p in model.parameters()),
                "averagings": rounds,
                "exposed_ms": 1e3 * exposed_s / rounds,
                "wall_ms": 1e3 * beyond_an_update(walls) / rounds,
                **{f"{kind}_ms": 1e3 * s / rounds for kind, s in parts.items()},
                "exposed_share": exposed_s / (given["steps"] * given["step_s"]),
            }
            print("ROW", json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
