"""A joiner that dies while the members connect with it; and a member that ends meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.members.places import meeting_place
from tests.processes import running

SCRIPT = """
import os, signal, sys, threading
import torch
import thinwire as tw
from thinwire.members import watcher

address, what = sys.argv[1:]
connect, begun = watcher.MemberGroups, threading.Event()

def direct(*args):
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    begun.set()
    return connect(*args)

watcher.MemberGroups = direct
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
config = tw.LocalSGD(4, begin_step=0)
with tw.join(address, run="test", timeout=5.0) as members:
    with tw.local_sgd(net, optimizer, config, members=members) as sync:
        more = 40
        while more:
            net(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if not sync.step or sync.step == 4:
                print("trains", flush=True)
            if begun.wait(0.02):
                more -= 1
                if what == "fails":
                    raise RuntimeError("of the test")
print("goes on alone", members.size, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stays", "fails"])
def test_a_joiner_that_dies_while_connecting_ends_nobody(what: str) -> None:
    """Neither the one member that is left, nor with an abort one that ends by an error."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with meeting_place(None) as address:
        command = [sys.executable, "-c", SCRIPT, address]
        with running([*command, what], cwd=Path.cwd(), **pipes) as member:
            assert member.stdout is not None
            assert member.stdout.readline() == "trains\n"
            with running([*command, "dies"], cwd=Path.cwd(), **pipes) as joiner:
                joiner.communicate()
            out, err = member.communicate()
    if what == "stays":
        assert member.returncode == 0, err
        assert out.endswith("goes on alone 1\n")
    else:
        assert member.returncode == 1, err
        assert "RuntimeError: of the test" in err
