"""`thinwire run`: a user's script over an emulated link; torch is the script's own matter."""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from thinwire._launched import place_among_ranks
from thinwire.tools.app import Count
from thinwire.tools.network.link import Link
from thinwire.tools.network.netns import Network, network, why_unavailable
from thinwire.tools.options import require_workers
from thinwire.tools.run.ranks import environments
from thinwire.tools.run.script import Ranks

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """Examples:

thinwire run --link 20mbit --workers 2 -- train.py --epochs 3

thinwire run --link 100mbit --latency 20ms --workers 4 -- train.py

thinwire run --link loopback -- train.py
"""


def run(
    *script: str,
    workers: Count = 2,
    link: str = "100mbit",
    latency: str = "0ms",
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run a Python script of yours on several ranks, over the link that compare emulates.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and what else torchrun sets, and
    GLOO_SOCKET_IFNAME. What the ranks print has their number in front. Says at the end what each
    of them has sent over its link, and in how many seconds. The exit status is that of the first
    rank that fails, 128 and the signal's number where a signal has killed it; the others are ended.

    Args:
        script: The Python file, and its arguments: all that follows it is the script's. Options of
            run come before it; "--" may stand between.
        workers: Ranks, each in a network of its own, as if it were a machine.
        link: Rate of each rank's link in both directions, such as 20mbit or 1gbit; "none" is
            unshaped, "loopback" uses no network namespaces and needs no root.
        latency: One-way delay of every packet, such as 10ms.
        quiet: Print nothing beside what the ranks print.
    """
    if place_among_ranks(os.environ) is not None:
        raise ValueError(
            "thinwire run starts the ranks itself: leave torchrun out, or what else has set RANK "
            "and WORLD_SIZE"
        )
    require_workers(workers)
    shape = Link.parse(link, latency)
    _require_script(script)
    reason = why_unavailable() if shape.emulated else None
    if reason is not None:
        raise ValueError(
            f"link={link!r} cannot be emulated here, it {reason}: run as root on Linux where "
            "'thinwire[cli]' is installed, or take --link loopback, this machine's own as it is"
        )
    with ExitStack() as stack:
        emulated = stack.enter_context(network(workers, shape)) if shape.emulated else None
        begin_s = time.monotonic()
        try:
            failed = _wait_for(script, workers, emulated)
        finally:
            if not quiet:
                print(_summary(shape, emulated, time.monotonic() - begin_s), flush=True)
    if failed is not None:
        rank, status = failed
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        others = "; the others have been ended" if workers > 1 else ""
        sys.stderr.write(f"thinwire: rank {rank} {ended}{others}\n")
        sys.exit(128 - status if status < 0 else status)


def _require_script(script: tuple[str, ...]) -> None:
    if not script:
        raise ValueError(
            "there is no script: write it after --, as in thinwire run --workers 2 -- train.py"
        )
    if Path(script[0]).is_dir():
        raise ValueError(f"{script[0]} is a folder; name a Python script after --")
    if not Path(script[0]).is_file():
        raise ValueError(f"{script[0]}: there is no such file; name a Python script after --")


def _wait_for(
    script: tuple[str, ...], workers: int, emulated: Network | None
) -> tuple[int, int] | None:
    fds = (-1,) * workers if emulated is None else emulated.namespace_fds
    with Ranks() as ranks:
        for fd, environment in zip(fds, environments(workers, emulated), strict=True):
            ranks.start([sys.executable, *script], environment, fd)
        return ranks.wait()


def _summary(link: Link, emulated: Network | None, seconds: float) -> str:
    if emulated is None:
        return f"{seconds:.1f} s over loopback, where bytes are not counted"
    sent = [f"rank {rank} sent {count:,} bytes" for rank, count in enumerate(emulated.bytes_sent())]
    return f"{seconds:.1f} s over the link {link}; with headers {', '.join(sent)}"
