"""Bytes of strangers at the ports of a run, and memory that ends."""

import contextlib
import os
import random
import socket
from pathlib import Path

import pytest

from tests.api import listeners
from tests.faults.injector import Fault
from tests.faults.lines import limited_memory
from tests.faults.test_injected import survivors, train
from tests.faults.training import Seen, make, meet_again
from tests.launched import free_port
from tests.ranks import Lost, Pool

CGROUPS = os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK)


def visited(rank: int, size: int, port: int, visit: bool) -> tuple[str, int]:
    """What ranks hold in common, and at how many ports a stranger spoke, on rank 1 at step 5."""
    meet_again(rank, size, port)
    trainer, spoken = make("dgc", timeout=30.0), 0
    for number in range(10):
        if number == 5 and rank == 1 and visit:
            chance = random.Random(5)
            for place in [port, *(port for _, port in listeners())]:
                # a listener may be of a network that this process has left
                with contextlib.suppress(ConnectionRefusedError):
                    for _ in range(4):
                        with socket.create_connection(("127.0.0.1", place), timeout=5) as stranger:
                            stranger.sendall(chance.randbytes(4096))
                    spoken += 1
        trainer.step(number)
    return trainer.common(), spoken


@pytest.mark.fault("random bytes at the ports of gloo and of the store")
def test_random_bytes_at_every_port_change_nothing(ranks: Pool) -> None:
    whole = ranks.run(visited, free_port(), False, size=3)
    seen = ranks.run(visited, free_port(), True, size=3)
    assert [one[0] for one in seen] == [one[0] for one in whole]
    assert seen[1][1] >= 2


def starved(rank: int, size: int) -> Seen:
    fault = Fault("out of memory", 1, 5, "once sent")
    if rank != 1:
        return train(rank, size, "dgc", fault)
    with limited_memory(512 << 20):
        return train(rank, size, "dgc", fault)


@pytest.mark.fault("the kernel ends a rank for want of memory")
@pytest.mark.skipif(not CGROUPS, reason="needs cgroups of version 1 that may be written")
def test_the_kernel_ends_a_rank_that_takes_too_much_memory(ranks: Pool) -> None:
    answers = ranks.run(starved, size=3, expect_errors=True)
    for place in Path("/sys/fs/cgroup/memory").glob("thinwire-*"):
        place.rmdir()
    assert isinstance(answers[1], Lost)
    assert answers[1].exit_code == -9
    survivors(answers, 1)
