"""Ranks of the pool over lines of their own, in network namespaces, to which things are done."""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.api import Link, inside, network
from tests.api import netns_Network as Network
from tests.faults.training import Seen, Trainer, digest, make
from tests.lab.namespaces import entered
from tests.launched import free_port
from tests.ranks import Pool
from tests.toys import engine_of
from tests.waiting import time_out, until

__all__ = ["TIMEOUT_S", "alike", "blackhole", "over_lines", "state", "traffic", "trained", "wide"]

TIMEOUT_S = time_out(6.0)


def over_lines(
    pool: Pool,
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    size: int,
    link: Link,
    at: int = -1,
    act: Callable[[Network], None] = lambda _: None,
    timeout_s: float = 90.0,
) -> list[Any]:
    """`function` of every rank, each behind a line; `act` is called once rank 0 is at step `at`."""
    with network(size, link) as net:
        paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in net.namespace_fds]
        actor = threading.Thread(target=_when_reached, args=(folder, at, lambda: act(net)))
        actor.start()
        try:
            return pool.run(
                _inside,
                paths,
                # another one each time: torch keeps a server by its port, in its old network
                f"tcp://{net.addresses[0]}:{free_port()}",
                function,
                (str(folder), *args),
                size=size,
                timeout_s=timeout_s,
                group_timeout_s=60,
                expect_errors=True,
            )
        finally:
            (folder / "over").touch()
            actor.join()


def reach(folder: str, step: int) -> None:
    """Note that rank 0 begins this step."""
    if dist.get_rank() == 0:
        Path(folder, f"at{step}").touch()


def _wait_for_the_act(folder: str) -> None:
    until(Path(folder, "acted").exists, "what is done to the line")


def _when_reached(folder: Path, at: int, act: Callable[[], None]) -> None:
    if at < 0:
        return
    over, reached = folder / "over", folder / f"at{at}"
    until(lambda: over.exists() or reached.exists(), f"step {at}")
    if not over.exists():
        act()
        (folder / "acted").touch()


def _inside(
    rank: int,
    size: int,
    paths: Sequence[str],
    method: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    dist.barrier()  # else the other may still be connecting
    dist.destroy_process_group()
    place = {"init_method": method, "rank": rank, "world_size": size}
    with entered(paths[rank]), patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth0"}):
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60), **place)
            return function(rank, size, *args)
        finally:
            # a broken group cannot always be left in good order
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def trained(
    rank: int, size: int, folder: str, way: str, last: int, timeout_s: float, after: int = -1
) -> Seen:
    """Train to step `last` or to the first error; step `after` waits for the other line."""
    trainer, seen = make(way, timeout=timeout_s), Seen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number in range(last):
            reach(folder, number)
            if number == after:
                _wait_for_the_act(folder)
            seen.before, begun = trainer.digest(), time.monotonic()
            try:
                trainer.step(number)
            except Exception as error:
                seen.seconds = time.monotonic() - begun
                seen.raised(error)
                break
            seen.updates = number + 1
            seen.seconds = max(seen.seconds, time.monotonic() - begun)
    seen.after, seen.common = trainer.digest(), alike(trainer)
    return seen


def alike(trainer: Trainer) -> str:
    """What ranks hold alike however a step ends: parameters, or anchors between two averagings."""
    kind = "parameter " if trainer.sync is None else "anchor "
    return digest({n: t for n, t in trainer.tensors().items() if n.startswith(kind)})


def wide(
    rank: int, size: int, folder: str, fields: dict[str, Any], last: int, after: int = -1
) -> Any:
    """Per step of a large model the bytes given to exchanges, those that left, and seconds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.Linear(512, 1024))
    engine = engine_of(model, lr=0.01, momentum=0.9, options={"timeout": 60.0}, **fields)
    rows = []
    data = torch.Generator().manual_seed(rank)
    for number in range(last):
        x = torch.randn(8, 1024, generator=data)
        reach(folder, number)
        if number == after:
            _wait_for_the_act(folder)
        before = engine.stats()["bytes_sent"], traffic(), time.monotonic()
        engine.train_step(x, x)
        after = engine.stats()["bytes_sent"], traffic(), time.monotonic()
        rows.append(tuple(now - then for now, then in zip(after, before, strict=True)))
    return rows


def traffic() -> int:
    """Bytes that have left this process's network by eth0."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise AssertionError("no eth0")


def state(namespace: int, what: str) -> None:
    """Take the interface inside a namespace "up" or "down"."""
    from pyroute2 import IPRoute

    def act() -> None:
        with IPRoute() as ip:
            ip.link("set", index=ip.link_lookup(ifname="eth0")[0], state=what)

    inside(namespace, act)


def blackhole(namespace: int, addresses: Sequence[str], *, ends: bool = False) -> None:
    """Drop, without a word, what goes from a namespace to these addresses, until it `ends`."""
    from pyroute2 import IPRoute

    def act() -> None:
        with IPRoute() as ip:
            for address in addresses:
                ip.route("del" if ends else "add", dst=f"{address}/32", type="blackhole")

    inside(namespace, act)


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[None]:
    """This process in a cgroup of its own (version 1) that may take so much from here on."""
    place = Path("/sys/fs/cgroup/memory") / f"thinwire-{os.getpid()}"
    place.mkdir()
    try:
        (place / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (place / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (place.parent / "cgroup.procs").write_text(str(os.getpid()))
        place.rmdir()
