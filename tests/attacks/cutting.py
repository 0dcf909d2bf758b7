"""Attack a: a rank that hosts the store is stopped, killed or cut off; every call of the others has
to end in time."""

import contextlib
import inspect
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import thinwire as tw
from tests.api import Link, enter_network, inside, network, why_unavailable
from tests.attacks.outcome import GRACE_S, Attack, Outcome, Seen, said_nothing_moved
from tests.attacks.training import make
from tests.ranks import Pool

__all__ = ["ATTACKS"]

TIMEOUT_S = 5.0
LONGEST_S = 60.0
"""When an attack is given up: the call never came back."""
SIZE = 3
OWN_LIMIT = "timeout" in inspect.signature(tw.local_sgd).parameters


def train_until_it_fails(
    rank: int,
    size: int,
    way: str,
    meeting: tuple[str, int],
    namespace: str,
    folder: str,
    save: bool,
) -> Seen:
    """Train until an error comes, and say how long the call took that raised it."""
    dist.barrier()  # else the other may still be connecting
    dist.destroy_process_group()
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    seen = Seen(more={"pid": os.getpid()})
    try:
        if namespace:
            there = os.open(namespace.format(rank=rank), os.O_RDONLY)
            enter_network(there)
            os.close(there)
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        method = f"tcp://{meeting[0]}:{meeting[1]}"
        # a patient one to meet on a busy machine; what the library does stands under its own
        patience = timedelta(seconds=60 if OWN_LIMIT else TIMEOUT_S)
        dist.init_process_group(
            "gloo", init_method=method, rank=rank, world_size=size, timeout=patience
        )
        trainer = make(way, **({"timeout": TIMEOUT_S} if OWN_LIMIT else {}))
        end, number = time.monotonic() + 150, 0
        while time.monotonic() < end:
            seen.before, begin_s = trainer.digest(), time.monotonic()
            try:
                if save and number % 3 == 2:
                    trainer.engine.save(Path(folder, "checkpoints"))
                else:
                    trainer.step(number)
            except Exception as error:
                seen.seconds = time.monotonic() - begin_s
                seen.raised(error)
                break
            number += 1
            if number == 4:
                Path(folder, f"ready{rank}").write_text(str(os.getpid()))
                end = time.monotonic() + LONGEST_S + 30
        seen.updates, seen.after = number, trainer.digest()
        if trainer.sync is not None:
            seen.before = (
                seen.after
            )  # the step of this rank alone is made before the averaging that fails
        Path(folder, f"done{rank}").touch()
        begin_s = time.monotonic()  # leaving must not wait without end either
        if trainer.engine is not None:
            trainer.engine.close()
        if trainer.sync is not None:
            trainer.sync.close()
        seen.more["leaving_s"] = time.monotonic() - begin_s
        begin_s = time.monotonic()
        with contextlib.suppress(Exception):  # a broken group cannot always be left in good order
            dist.destroy_process_group()
        seen.more["destroying_s"] = time.monotonic() - begin_s  # torch's own business
        return seen
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        enter_network(home)
        os.close(home)


def cut(how: str, way: str, *, save: bool = False) -> Callable[[Pool, int], Outcome]:
    """Rank 0, which hosts the store too, is taken away at a random moment."""

    def make_it(pool: Pool, seed: int) -> Outcome:
        chance = random.Random(seed)
        in_network = how not in ("stopped", "killed")
        if how in ("packets dropped", "connections reset") and shutil.which("nft") is None:
            return Outcome("skipped", "nft is not installed")
        if in_network and (reason := why_unavailable()) is not None:
            return Outcome("skipped", reason)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if in_network:
                net = stack.enter_context(network(SIZE, Link.parse("none")))
                paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in net.namespace_fds]
                for rank, path in enumerate(paths):
                    Path(folder, f"net{rank}").symlink_to(path)
                place, namespace = (net.addresses[0], 29500), folder + "/net{rank}"
                fds = net.namespace_fds
            else:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    place = ("127.0.0.1", free.getsockname()[1])
                namespace, fds = "", ()
            attacker = stack.enter_context(ThreadPoolExecutor(1)).submit(
                _attack, how, Path(folder), fds, chance.random()
            )
            answers = pool.run(
                train_until_it_fails, way, place, namespace, folder, save,
                size=SIZE, timeout_s=2 * LONGEST_S + 150, group_timeout_s=60, expect_errors=True,
            )  # fmt: skip
            attacker.result()
            if in_network:
                # what is left of the cut connections is not carried into the next attack
                pool.close()
            made = Path(folder, "made").exists()
        return (
            _verdict(how, answers)
            if made
            else Outcome("skipped", f"training did not begin: {answers}"[:500])
        )

    return make_it


def _attack(how: str, folder: Path, fds: tuple[int, ...], moment_s: float) -> None:
    end = time.monotonic() + 150  # kernels may have to be compiled
    ready = folder / "ready0"
    while (
        not all((folder / f"ready{rank}").exists() for rank in range(SIZE)) or not ready.read_text()
    ):
        if time.monotonic() > end:
            return
        time.sleep(0.02)
    (folder / "made").touch()
    time.sleep(moment_s)
    victim = int(ready.read_text())
    if how == "stopped":
        os.kill(victim, signal.SIGSTOP)
    elif how == "killed":
        os.kill(victim, signal.SIGKILL)
    elif how == "link down":
        inside(fds[0], _link_down)
    elif how == "connections reset":
        inside(fds[0], lambda: _filter("reject with tcp reset", "input", "output"))
    elif how == "packets dropped":
        inside(fds[0], lambda: _choke("eth0"))
        inside(fds[0], lambda: _filter("drop", "input"))
    else:
        inside(fds[0], lambda: _choke("eth0"))
    end = time.monotonic() + LONGEST_S
    others = range(1, SIZE) if how in ("stopped", "killed") else range(SIZE)
    while time.monotonic() < end and not all((folder / f"done{rank}").exists() for rank in others):
        time.sleep(0.05)
    if how == "stopped":
        os.kill(victim, signal.SIGKILL)
        os.kill(victim, signal.SIGCONT)


def _link_down() -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="eth0")[0], state="down")


def _filter(verdict: str, *ways: str) -> None:
    """What becomes of all TCP but resets through eth0, on "input" or "output"."""
    chains = [
        f'chain {way} {{ type filter hook {way} priority 0; {way[0]}ifname "eth0" tcp flags & rst '
        f"== 0 {verdict}; }}"
        for way in ways
    ]
    rules = "\n".join(["table inet attack {", *chains, "}"])
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


def _choke(interface: str) -> None:
    """Nothing of what is sent leaves any more."""
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        index = ip.link_lookup(ifname=interface)[0]
        ip.tc("replace", "tbf", index, handle=0x10000, rate=1000, burst=10, limit=10)


def _verdict(how: str, answers: list[Any]) -> Outcome:
    alive = answers[1:] if how in ("stopped", "killed") else answers
    details = "; ".join(
        f"{a.error} after {a.seconds:.1f} s: {a.text[:200]}"
        if isinstance(a, Seen)
        else repr(a)[:300]
        for a in alive
    )
    if any(not isinstance(a, Seen) for a in alive):
        kind = "late" if any(a is None for a in alive) else "crash"
        return Outcome(kind, details)
    seconds = max(a.seconds for a in alive)
    leaving = max(a.more.get("leaving_s", 0.0) for a in alive)
    if any(not a.error for a in alive):
        return Outcome("late", "no error came: " + details, seconds=LONGEST_S)
    for rank, answer in enumerate(alive, start=len(answers) - len(alive)):
        if not answer.family:
            return Outcome("crash", "a bare error: " + details, seconds=seconds)
        if said_nothing_moved(answer.text) and answer.before != answer.after:
            return Outcome(
                "false",
                f"rank {rank} said that nothing was applied, and its state moved: " + details,
            )
        named = re.search(r"\brank ([\d, ]*\d) (?:did not|closed)", answer.text)
        wrong = named is not None and rank != 0 and [int(r) for r in named[1].split(",")] != [0]
        if wrong:
            return Outcome(
                "false", f"rank {rank} named the wrong rank: " + details, seconds=seconds
            )
    if seconds > TIMEOUT_S + GRACE_S or leaving > GRACE_S:
        return Outcome(
            "late", f"{seconds:.1f} s, and {leaving:.1f} s to leave: " + details, seconds=seconds
        )
    return Outcome("held", details, seconds=seconds)


HOWS = (
    "stopped",
    "killed",
    "link down",
    "packets dropped",
    "packets of one direction dropped",
    "connections reset",
)
ATTACKS = [
    Attack("a", f"store's host {how}, {way}", cut(how, way), times=5)
    for how in HOWS
    for way in ("dense", "dgc", "local")
] + [
    Attack("a", f"store's host {how}, saving", cut(how, "dense", save=True), times=5)
    for how in ("stopped", "killed")
]
